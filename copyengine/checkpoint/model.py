"""A checkpoint, opened: its ModelSpec and where every tensor lies, all of it checked, none of it read.

With load format "dummy" there are no tensors to find: they are made up (`copyengine.checkpoint.dummy` for the experts).
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from copyengine.checkpoint.checks import DTYPES, Checks, Linear
from copyengine.checkpoint.directory import locate, read_config
from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import (
    ExpertName,
    dense_names,
    dialect_of,
    expert_names,
    input_names,
    spells,
    spelt_scheme,
)
from copyengine.checkpoint.schemes import INPUT_SCALES
from copyengine.families import FAMILIES, parse_spec
from copyengine.families.decoder import checkpoint_dtype
from copyengine.families.expert_scheme import expert_scheme
from copyengine.families.quantisation import quantisation, with_quantised_inputs
from copyengine.model_spec import ModelSpec
from copyengine.protocol import ExpertActivations, LoadFormat
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from copyengine.wire.logs import Log

RANDOM_WEIGHTS = "slotstream_random_weights"
"""Key of config.json that marks a model whose weights were drawn, not trained."""

log = Log(__name__)


class Model(Struct, frozen=True):
    """A checkpoint of a known family."""

    directory: Path
    spec: ModelSpec
    config: Keys  # config.json with the overrides
    dense: dict[str, TensorRef]  # by canonical name; empty if the weights are made up
    experts: tuple[tuple[ExpertName, TensorRef], ...]
    load_format: LoadFormat = "auto"
    inputs: tuple[tuple[ExpertName, TensorRef], ...] = ()  # scales of the experts' activations, if these are rounded
    spare_head: TensorRef | None = None  # of a model whose head is its embedding: one that the files hold all the same
    linears: dict[str, Linear] = {}  # by canonical name too: those outside the experts that are quantised

    @property
    def random_weights(self) -> bool:
        """The weights are random: what the model says means nothing."""
        return self.load_format == "dummy" or self.config.get(RANDOM_WEIGHTS) is True


def open_model(
    directory: str | Path,
    hf_overrides: str = "{}",
    load_format: LoadFormat = "auto",
    expert_activations: ExpertActivations = "plain",
) -> Model:
    """The checkpoint in `directory`, with the JSON object `hf_overrides` merged over its config.json.

    Every tensor is present, of the right shape and a known element type, inside its file; with `load_format` "dummy" no
    file but config.json is looked at, and a model that states no element type is bfloat16. With `expert_activations`
    "w4a4" the scales of activations are there too. ConfigError otherwise, naming the file, key or tensor.
    """
    directory = Path(directory)
    config = read_config(directory, hf_overrides)
    spec = parse_spec(config)
    if expert_activations == "w4a4":
        spec = with_quantised_inputs(spec, config)
    stated = checkpoint_dtype(config)
    if load_format == "dummy":
        spec = msgspec.structs.replace(spec, checkpoint_dtype=stated or "bfloat16")
        return Model(directory, spec, config, {}, (), load_format)
    refs = locate(directory)
    family = FAMILIES[spec.architecture]
    scheme, quantised = expert_scheme(config, spec, family), quantisation(config)
    record_layout(spec, "bfloat16")  # refuses sizes that the format cannot have
    dialect = dialect_of(spec, family.spellings, refs, scheme)
    if not spells(dialect, scheme):
        assert scheme is not None
        raise ConfigError(f"{directory}: {scheme.name} experts of {spec.architecture} are not supported")
    scheme = spelt_scheme(spec, dialect, refs, scheme)
    schemes = sorted(quantised.schemes if quantised else (), key=lambda other: other != scheme)  # the experts' first
    checks = Checks(directory, spec, refs, scheme, schemes)
    found = {entry.name: checks.dense(entry) for entry in dense_names(spec, dialect)}
    dense = {name: ref for name, ref in found.items() if isinstance(ref, TensorRef)}
    linears = {name: linear for name, linear in found.items() if isinstance(linear, Linear)}
    experts = tuple((entry, checks.expert(entry)) for entry in expert_names(spec, dialect, scheme))
    if stated is None:
        spec = msgspec.structs.replace(spec, checkpoint_dtype=DTYPES[dense["embed"].dtype])
    inputs = tuple((entry, checks.expert(entry)) for entry in input_names(spec, dialect, scheme))
    used = len(dense) + sum(len(linear.refs) for linear in linears.values()) + len(experts) + len(inputs)
    _log_unused(directory, refs, used, bool(inputs))
    head = refs.get(dialect.dense["head"]) if spec.tie_word_embeddings else None
    return Model(directory, spec, config, dense, experts, inputs=inputs, spare_head=head, linears=linears)


def dense_file_nbytes(model: Model) -> int:
    """Bytes that all tensors but the experts take in the files."""
    quantised = sum(ref.nbytes for linear in model.linears.values() for ref in linear.refs)
    return sum(ref.nbytes for ref in model.dense.values()) + quantised


def expert_file_nbytes(model: Model) -> int:
    """Bytes that the experts take in the files, with the scales of their activations."""
    return sum(ref.nbytes for _, ref in (*model.experts, *model.inputs))


def _log_unused(directory: Path, refs: Mapping[str, TensorRef], used: int, with_inputs: bool) -> None:
    unused = len(refs) - used
    inputs = sum(name.endswith(INPUT_SCALES) for name in refs if not with_inputs)
    if unused:
        log.info("tensors_unused", directory=str(directory), tensors=unused, input_scales=inputs)
