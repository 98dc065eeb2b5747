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
from copyengine.checkpoint.names import DenseName, ExpertName, dense_names, dialect_of, expert_names, names_linears
from copyengine.checkpoint.schemes import ELEMENT_TYPES, SCHEMES, SIGNS, Scheme, beside
from copyengine.families import FAMILIES, parse_spec
from copyengine.families.decoder import checkpoint_dtype
from copyengine.families.quantisation import expert_scheme
from copyengine.model_spec import ModelSpec
from copyengine.protocol import LoadFormat
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError

DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' spelling -> ours, of the element types a weight may have."""

RANDOM_WEIGHTS = "slotstream_random_weights"
"""Key of config.json that marks a model whose weights were drawn, not trained."""

MAKE_ONE = "take one that is not quantised, or make one of it with copyengine.checkpoint.quantise"

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
    refs = locate(directory)
    scheme = expert_scheme(config)
    record_layout(spec, "bfloat16")  # refuses sizes that the format cannot have
    dialect = dialect_of(spec, FAMILIES[spec.architecture].dialects, refs, scheme)
    if scheme and not names_linears(dialect):
        raise ConfigError(f"{directory}: {scheme.name} experts of {spec.architecture} are not supported")
    check = _Check(directory, spec, refs, scheme)
    dense = {entry.name: check.dense(entry) for entry in dense_names(spec, dialect)}
    experts = tuple((entry, check.expert(entry)) for entry in expert_names(spec, dialect, scheme))
    if stated is None:
        spec = msgspec.structs.replace(spec, checkpoint_dtype=DTYPES[dense["embed"].dtype])
    _log_unused(directory, refs, len(dense) + len(experts), scheme)
    return Model(directory, spec, config, dense, experts)


def dense_file_nbytes(model: Model) -> int:
    """Bytes that the tensors kept whole take in the files."""
    return sum(ref.nbytes for ref in model.dense.values())


def expert_file_nbytes(model: Model) -> int:
    """Bytes that the experts take in the files."""
    return sum(ref.nbytes for _, ref in model.experts)


def _log_unused(directory: Path, refs: Mapping[str, TensorRef], used: int, scheme: Scheme | None) -> None:
    unused = len(refs) - used
    inputs = sum(name.endswith("." + scheme.input_scale) for name in refs) if scheme else 0
    if unused:
        of_inputs = f", {inputs} of them scales of activations, which are not quantised" if inputs else ""
        log.info("%s: %d tensors of the checkpoint are not used%s", directory, unused, of_inputs)


class _Check:
    """Finds tensors in the files. ConfigError, naming the tensor, for one that is not there or not as it has to be."""

    def __init__(self, directory: Path, spec: ModelSpec, refs: Mapping[str, TensorRef], scheme: Scheme | None) -> None:
        self._directory = directory
        self._spec = spec
        self._refs = refs
        self._scheme = scheme

    def dense(self, entry: DenseName) -> TensorRef:
        """A tensor that is kept whole."""
        self._refuse_quantised(entry.source, f"only experts may be: {MAKE_ONE}")
        ref = self._refs.get(entry.source)
        if ref is None:
            is_head = entry.name == "head"
            hint = "; a checkpoint without it needs tie_word_embeddings: true" if is_head else ""
            raise self._missing(entry.source, hint)
        return _floating(ref, entry.source, entry.shape)

    def expert(self, entry: ExpertName) -> TensorRef:
        """A tensor of one expert, or of all experts of a layer."""
        if self._scheme is None:
            self._refuse_quantised(entry.source, "config.json has no quantization_config that says so")
        ref = self._refs.get(entry.source)
        if ref is None:
            raise self._missing(entry.source, self._expert_hint(entry))
        if self._scheme is None:
            return _floating(ref, entry.source, entry.shape)
        wanted = ELEMENT_TYPES[entry.kind]
        if ref.dtype != wanted:
            raise ConfigError(
                f"{ref.path}: tensor {entry.source} has element type {ref.dtype}, but config.json's "
                f"quantization_config says {self._scheme.name}, where it is {wanted}"
            )
        is_scalar = entry.kind in ("global", "reciprocal") and ref.shape == ()
        return ref if is_scalar else _shaped(ref, entry.source, entry.shape)

    def _refuse_quantised(self, source: str, fix: str) -> None:
        """An empty tensor is no sign of anything."""
        for suffix in SIGNS:
            sign = self._refs.get(beside(source, suffix))
            if sign is not None and sign.nbytes:
                raise ConfigError(f"{sign.path}: {source} is quantised ({beside(source, suffix)} is there), but {fix}")

    def _missing(self, source: str, hint: str) -> ConfigError:
        return ConfigError(
            f"{self._directory}: tensor {source} is missing, which {self._spec.architecture} with "
            f"{len(self._spec.layers)} layers needs{hint}"
        )

    def _expert_hint(self, entry: ExpertName) -> str:
        """Whose tensor it is, and whether the files are of another scheme than config.json says."""
        if self._scheme is None or entry.expert is None:
            return ""
        whose = f" for expert {entry.expert} of layer {self._spec.moe_layers[entry.bank]}"
        stem = entry.source.rpartition(".")[0]
        for other in SCHEMES:
            for tensor in other.tensors:
                name = f"{stem}.{tensor.suffix}"
                if name in self._refs and tensor not in self._scheme.tensors:
                    found = f"{name} ({self._refs[name].dtype})"
                    return f"{whose}; {found} is there, but config.json says {self._scheme.name}"
        return whose


def _floating(ref: TensorRef, source: str, shape: tuple[int, ...]) -> TensorRef:
    """`ref`, which is `shape` and not quantised."""
    if ref.dtype not in DTYPES:
        raise ConfigError(f"{ref.path}: tensor {source} has element type {ref.dtype}; supported: {', '.join(DTYPES)}")
    return _shaped(ref, source, shape)


def _shaped(ref: TensorRef, source: str, shape: tuple[int, ...]) -> TensorRef:
    if ref.shape != shape:
        raise ConfigError(f"{ref.path}: tensor {source} has shape {list(ref.shape)}, config.json wants {list(shape)}")
    return ref
