"""A checkpoint, opened: its ModelSpec and where every tensor lies, all of it checked, none of it read.

With load format "dummy" there are no tensors to find: they are made up (`copyengine.checkpoint.dummy` for the experts).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from copyengine.checkpoint.directory import locate, read_config
from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import DenseName, ExpertName, dense_names, dialect_of, expert_names
from copyengine.families import FAMILIES, parse_spec
from copyengine.families.decoder import checkpoint_dtype
from copyengine.model_spec import ModelSpec
from copyengine.protocol import LoadFormat
from copyengine.wire.errors import ConfigError

DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' spelling -> ours, of the element types a weight may have."""

RANDOM_WEIGHTS = "slotstream_random_weights"
"""Key of config.json that marks a model whose weights were drawn, not trained."""

log = logging.getLogger(__name__)


class Model(Struct, frozen=True):
    """A checkpoint of a known family."""

    directory: Path
    spec: ModelSpec
    config: Keys  # config.json with the overrides
    dense: dict[str, TensorRef]  # by canonical name; empty if the weights are made up
    experts: tuple[tuple[ExpertName, TensorRef], ...]
    load_format: LoadFormat = "auto"

    @property
    def random_weights(self) -> bool:
        """The weights are random: what the model says means nothing."""
        return self.load_format == "dummy" or self.config.get(RANDOM_WEIGHTS) is True


def open_model(directory: str | Path, hf_overrides: str = "{}", load_format: LoadFormat = "auto") -> Model:
    """The checkpoint in `directory`, with the JSON object `hf_overrides` merged over its config.json.

    Every tensor is present, of the right shape and a known element type, inside its file; with `load_format` "dummy" no
    file but config.json is looked at, and a model that states no element type is bfloat16. ConfigError otherwise,
    naming the file, key or tensor.
    """
    directory = Path(directory)
    config = read_config(directory, hf_overrides)
    spec = parse_spec(config)
    stated = checkpoint_dtype(config)
    if load_format == "dummy":
        spec = msgspec.structs.replace(spec, checkpoint_dtype=stated or "bfloat16")
        return Model(directory, spec, config, {}, (), load_format)
    if spec.expert_format:
        raise ConfigError(
            f"{directory}: this version serves {spec.expert_format} experts only with made-up weights "
            "(--load-format dummy); use a bfloat16, float16 or float32 checkpoint"
        )
    refs = locate(directory)
    dialect = dialect_of(spec, FAMILIES[spec.architecture].dialects, refs)
    dense = {entry.name: _checked(directory, entry, refs, spec) for entry in dense_names(spec, dialect)}
    experts = tuple((entry, _checked(directory, entry, refs, spec)) for entry in expert_names(spec, dialect))
    if stated is None:
        spec = msgspec.structs.replace(spec, checkpoint_dtype=DTYPES[dense["embed"].dtype])
    unknown = len(refs) - len(dense) - len(experts)
    if unknown:
        log.info("%s: %d tensors of the checkpoint are not used", directory, unknown)
    return Model(directory, spec, config, dense, experts)


def dense_file_nbytes(model: Model) -> int:
    """Bytes that the tensors kept whole take in the files."""
    return sum(ref.nbytes for ref in model.dense.values())


def expert_file_nbytes(model: Model) -> int:
    """Bytes that the experts take in the files."""
    return sum(ref.nbytes for _, ref in model.experts)


def _checked(
    directory: Path, entry: DenseName | ExpertName, refs: Mapping[str, TensorRef], spec: ModelSpec
) -> TensorRef:
    ref = refs.get(entry.source)
    if ref is None:
        is_head = isinstance(entry, DenseName) and entry.name == "head"
        hint = "; a checkpoint without it needs tie_word_embeddings: true" if is_head else ""
        raise ConfigError(
            f"{directory}: tensor {entry.source} is missing, which {spec.architecture} with "
            f"{len(spec.layers)} layers needs{hint}"
        )
    if ref.shape != entry.shape:
        raise ConfigError(
            f"{ref.path}: tensor {entry.source} has shape {list(ref.shape)}, config.json wants {list(entry.shape)}"
        )
    if ref.dtype not in DTYPES:
        raise ConfigError(
            f"{ref.path}: tensor {entry.source} has element type {ref.dtype}; supported: {', '.join(DTYPES)}"
        )
    return ref
