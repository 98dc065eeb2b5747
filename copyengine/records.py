"""Which record layout the experts of a model have."""

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
    if spec.expert_format and dtype == "float16":
        raise ConfigError(f"--dtype float16: {spec.expert_format} experts are not computed in it; use --dtype bfloat16")
    try:
        return layout(spec.expert_format or dtype, spec.hidden, moe.intermediate)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None
