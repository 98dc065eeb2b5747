"""Family: gpt-oss: attention with sinks, and windows in every second layer; experts with biases and a clamped SwiGLU.

The files have one tensor for all experts of a layer, in which gate's and up's rows alternate.
"""

from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, number, wrong
from copyengine.checkpoint.names import Dialect, ExpertTensor
from copyengine.checkpoint.rearrange import Order
from copyengine.checkpoint.schemes import FUSED_MXFP4
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, moe
from copyengine.families.family import Family
from copyengine.families.qwen3 import DENSE_NAMES
from copyengine.families.windows import layer_windows, window
from copyengine.model_spec import LayerSpec, ModelSpec
from kernels.formats import ExpertFormat

_DENSE = MappingProxyType(
    DENSE_NAMES
    | {
        "layers.{i}.router": "model.layers.{i}.mlp.router.weight",
        "layers.{i}.router_bias": "model.layers.{i}.mlp.router.bias",
        "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
    }
)
_EXPERTS = "model.layers.{i}.mlp.experts."
_BIASES = (
    ExpertTensor(_EXPERTS + "gate_up_proj_bias", "gate_up_bias", order=Order(interleaved=True)),
    ExpertTensor(_EXPERTS + "down_proj_bias", "down_bias"),
)
_CODES = 16
"""Bytes of a block: its 32 codes."""

MXFP4 = Dialect(
    _DENSE,
    (
        ExpertTensor(
            _EXPERTS + "gate_up_proj_blocks", "gate_up", kind="codes", order=Order(interleaved=True, run=_CODES)
        ),
        ExpertTensor(_EXPERTS + "gate_up_proj_scales", "gate_up_scale", kind="powers", order=Order(interleaved=True)),
        ExpertTensor(_EXPERTS + "down_proj_blocks", "down", kind="codes", order=Order(run=_CODES)),
        ExpertTensor(_EXPERTS + "down_proj_scales", "down_scale", kind="powers"),
        *_BIASES,
    ),
    FUSED_MXFP4,
)
"""The files of the hub."""

PLAIN = Dialect(
    _DENSE,
    (
        ExpertTensor(_EXPERTS + "gate_up_proj", "gate_up", order=Order(transposed=True, interleaved=True)),
        ExpertTensor(_EXPERTS + "down_proj", "down", order=Order(transposed=True)),
        *_BIASES,
    ),
)
"""Not quantised, as transformers holds them."""

SWIGLU_ALPHA = 1.702
"""The one that the kernels have."""

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS: Keys = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}
"""What transformers' GptOssConfig takes where a config.json says nothing."""


def _parse(architecture: str, config: Keys) -> ModelSpec:
    """Windows in every second layer, from the first on, unless `layer_types` says where."""
    config = _with_defaults(config)
    alpha = number(config, "swiglu_alpha", default=SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise wrong("swiglu_alpha", alpha, f"must be {SWIGLU_ALPHA}")
    count = layer_count(config)
    attention = replace(gqa(config, default_head_dim=None, qk_norm=False), sinks=True)
    windows = layer_windows(config, window(config, None), [i % 2 == 0 for i in range(count)], by_layer=True)
    routed = moe(config, expert_count(config), "intermediate_size")
    routed = replace(routed, norm_topk_prob=True, router_bias=True, softmax_chosen=True)
    layers = tuple(LayerSpec(replace(attention, window=size), routed) for size in windows)
    limit = number(config, "swiglu_limit", low=1e-6, default=7.0)
    spec = decoder(architecture, config, layers, norm_eps=1e-5)
    return replace(spec, expert_format=ExpertFormat(bias=True, swiglu_limit=limit))


def _with_defaults(config: Keys) -> Keys:
    stated = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    inner = stated.get("rope_parameters")
    defaults = dict(DEFAULTS)
    if isinstance(inner, dict) and inner.get("rope_theta") is not None:
        del defaults["rope_theta"]
    if not stated.get("rope_scaling") and not inner:
        defaults["rope_scaling"] = ROPE
    return {**defaults, **stated}


GPT_OSS = Family("gpt_oss", _parse, (PLAIN, MXFP4))
