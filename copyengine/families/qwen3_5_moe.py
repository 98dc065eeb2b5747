"""Family: the text part of Qwen3.5-MoE: layers as Qwen3-Next's, with gated DeltaNet's projections apart.

A checkpoint of the whole has a vision tower, and a head that predicts further tokens: neither is used.
"""

from types import MappingProxyType

from copyengine.checkpoint.keys import Keys, nested
from copyengine.checkpoint.names import Dialect, ExpertTensor
from copyengine.families.family import Family
from copyengine.families.qwen2_moe import DENSE as QWEN2_MOE_NAMES
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.families.qwen3_next import DELTA_NAMES, hybrid
from copyengine.model_spec import ModelSpec

_APART = {
    f"layers.{{i}}.delta.{part}": f"model.layers.{{i}}.linear_attn.in_proj_{part}.weight"
    for part in ("qkv", "z", "b", "a")
}
_DENSE = MappingProxyType(QWEN2_MOE_NAMES | DELTA_NAMES | _APART)

PREFIXES = ("model.language_model.", "model.", "language_model.model.")
"""Where the text part lies: in the files of the hub, alone, and in those of some other engines."""


def text_keys(config: Keys) -> Keys:
    """The keys of the text part: those of `text_config`, and of config.json itself what is not there.

    Whether head and embedding are one is what the outer one says, if it does.
    """
    text = nested(config, "text_config")
    if not text:
        return config
    stated = {key: value for key, value in text.items() if value is not None}
    outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    ties = {} if config.get("tie_word_embeddings") is None else {"tie_word_embeddings": config["tie_word_embeddings"]}
    return {**outer, **stated, **ties}


def _parse(architecture: str, config: Keys) -> ModelSpec:
    """The router's weights are always renormalised."""
    return hybrid(architecture, {**text_keys(config), "norm_topk_prob": True}, grouped=False)


def _prefixed(prefix: str, dialect: Dialect) -> Dialect:
    """The dialect, whose names begin with "model.", under another prefix."""

    def renamed(source: str) -> str:
        if source == "lm_head.weight":
            return "language_model.lm_head.weight" if prefix.startswith("language_model.") else source
        return prefix + source.removeprefix("model.")

    return Dialect(
        MappingProxyType({name: renamed(source) for name, source in dialect.dense.items()}),
        tuple(ExpertTensor(renamed(row.source), row.field, row.part, row.parts) for row in dialect.experts),
    )


DIALECTS = tuple(
    _prefixed(prefix, Dialect(_DENSE, experts)) for prefix in PREFIXES for experts in (FUSED.experts, HUB.experts)
)

QWEN3_5_MOE = Family("qwen3_5_moe", _parse, DIALECTS)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", _parse, DIALECTS)
