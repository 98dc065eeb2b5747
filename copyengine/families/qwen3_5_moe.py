"""Family: the text part of Qwen3.5-MoE: layers as Qwen3-Next's, with gated DeltaNet's projections apart.

A checkpoint of the whole has a vision tower, and a head that predicts further tokens: neither is used.
"""

from types import MappingProxyType

from copyengine.checkpoint.keys import Keys, nested
from copyengine.checkpoint.names import Dialect, under_prefix
from copyengine.checkpoint.spellings import PREFIXES
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


HUB_PREFIX = PREFIXES.index(("model.language_model.", "lm_head."))
"""Under which the hub's files have the text part."""

DIALECTS = tuple(under_prefix(Dialect(_DENSE, experts), HUB_PREFIX) for experts in (FUSED.experts, HUB.experts))

QWEN3_5_MOE = Family("qwen3_5_moe", _parse, DIALECTS)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", _parse, DIALECTS)
