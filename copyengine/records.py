"""Which record layout the experts of a model have."""

from msgspec.structs import replace

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError
from kernels.formats import RecordLayout, layout


def record_layout(spec: ModelSpec, dtype: str) -> RecordLayout | None:
    """The expert records of `spec` when all else is `dtype`; None for a dense model.

    ConfigError for sizes that the format cannot have, and for float16 activations on quantised experts, which no
    kernel has.
    """
    moe = spec.moe
    if moe is None:
        return None
    if spec.expert_format.name and dtype == "float16":
        raise ConfigError(
            f"--dtype float16: {spec.expert_format.name} experts are not computed in it; use --dtype bfloat16"
        )
    try:
        kind = replace(spec.expert_format, name=spec.expert_format.name or dtype)
        return layout(kind, spec.hidden, moe.intermediate)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None
