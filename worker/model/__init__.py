"""The model: one file per layer kind, one per way to put them together."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError
from worker.kv import KvCache
from worker.model.moe import Experts
from worker.model.operations import PLAIN, Operations
from worker.model.pre_norm import build_pre_norm
from worker.model.stack import Decoder, Weights
from worker.state import StateSlots

Builder = Callable[[ModelSpec, Weights, KvCache, Experts | None, StateSlots | None, Operations], Decoder]

FAMILIES: Mapping[str, Builder] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": build_pre_norm,
        "Qwen3ForCausalLM": build_pre_norm,
        "Qwen2MoeForCausalLM": build_pre_norm,
        "MixtralForCausalLM": build_pre_norm,
        "OlmoeForCausalLM": build_pre_norm,
        "Qwen3NextForCausalLM": build_pre_norm,
        "Qwen3_5MoeForCausalLM": build_pre_norm,
        "Qwen3_5MoeForConditionalGeneration": build_pre_norm,
        "GptOssForCausalLM": build_pre_norm,
        "DeepseekV3ForCausalLM": build_pre_norm,
    }
)
"""By architecture; the same ones as in `copyengine.families`."""


def build_model(
    spec: ModelSpec,
    weights: Weights,
    kv: KvCache,
    experts: Experts | None,
    states: StateSlots | None = None,
    operations: Operations = PLAIN,
) -> Decoder:
    """The model of `spec`, its weights taken out of `weights`; `experts` is None for a dense model, `states` for one
    without recurrent state. `operations` are of the kind that `experts` are of.

    ConfigError for an architecture that is not known, and for weights that are missing or left over.
    """
    build = FAMILIES.get(spec.architecture)
    if build is None:
        raise ConfigError(f"architecture {spec.architecture!r} is not supported; known: {', '.join(FAMILIES)}")
    try:
        model = build(spec, weights, kv, experts, states, operations)
    except KeyError as missing:
        raise ConfigError(f"weight {missing} of {spec.architecture} was not loaded") from None
    if weights:
        raise ConfigError(f"weights that {spec.architecture} has no use for: {', '.join(sorted(weights))}")
    return model
