"""Family: Qwen3-Next: layers of gated DeltaNet and of gated attention, routed experts and a shared one beside them."""

from collections.abc import Sequence
from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, integer, nested, number, wrong
from copyengine.checkpoint.names import Dialect
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, mixed_layers, moe, sparse_layers
from copyengine.families.family import Family
from copyengine.families.qwen2_moe import DENSE as QWEN2_MOE_NAMES
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.families.windows import refuse_windows
from copyengine.model_spec import GatedDeltaSpec, GqaSpec, ModelSpec

FULL, LINEAR = "full_attention", "linear_attention"
"""Kinds of layers, as `layer_types` names them."""

ROTARY_SHARE = 0.25
"""Of a head, where config.json does not say."""

DELTA_NAMES = MappingProxyType(
    {
        "layers.{i}.delta.conv": "model.layers.{i}.linear_attn.conv1d.weight",
        "layers.{i}.delta.a_log": "model.layers.{i}.linear_attn.A_log",
        "layers.{i}.delta.dt_bias": "model.layers.{i}.linear_attn.dt_bias",
        "layers.{i}.delta.gated_norm": "model.layers.{i}.linear_attn.norm.weight",
        "layers.{i}.delta.o": "model.layers.{i}.linear_attn.out_proj.weight",
    }
)
_GROUPED = {
    "layers.{i}.delta.qkvz": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
    "layers.{i}.delta.ba": "model.layers.{i}.linear_attn.in_proj_ba.weight",
}
_DENSE = MappingProxyType(QWEN2_MOE_NAMES | DELTA_NAMES | _GROUPED)


def hybrid(architecture: str, config: Keys, grouped: bool) -> ModelSpec:
    """A model of both kinds of layers; `grouped` as GatedDeltaSpec has it."""
    count, experts = layer_count(config), expert_count(config)
    kinds = layer_kinds(config, count)
    attention, delta = gated_attention(config), gated_delta(config, grouped)
    sparse = sparse_layers(config, count, experts)
    routed = None
    if any(sparse):
        keys = {"norm_topk_prob": True, **config}  # which transformers' configurations default to
        routed = replace(moe(keys, experts), shared_intermediate=integer(config, "shared_expert_intermediate_size"))
    attentions = [attention if kind == FULL else delta for kind in kinds]
    layers = mixed_layers(config, attentions, sparse, routed)
    return replace(decoder(architecture, config, layers), zero_centred_norms=True)


def layer_kinds(config: Keys, count: int) -> Sequence[str]:
    """FULL or LINEAR for each layer."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = integer(config, "full_attention_interval", default=4)
        return [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, LINEAR) for kind in kinds):
        raise wrong("layer_types", kinds, f"must be {FULL} or {LINEAR} for each of {count} layers")
    return kinds


def gated_attention(config: Keys) -> GqaSpec:
    """Attention with an output gate, of whose heads the first part is rotated.

    Of mrope, whose axes all have a token's position where there is text alone, nothing is left.
    """
    refuse_windows(config)
    ropes = {name: nested(config, name) for name in ("rope_parameters", "rope_scaling")}
    shares = [
        number(keys, "partial_rotary_factor", 0.0, 1.0, ROTARY_SHARE)
        for keys in (config, *ropes.values())
        if keys.get("partial_rotary_factor") is not None
    ]
    mrope = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    plain = {name: {key: value for key, value in keys.items() if key not in mrope} for name, keys in ropes.items()}
    attention = gqa({**config, **plain, "layer_types": None, "partial_rotary_factor": None}, 256, qk_norm=True)
    share = shares[-1] if shares else ROTARY_SHARE
    rotary_dim = int(attention.head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise wrong("partial_rotary_factor", share, f"of head_dim {attention.head_dim} must be even and not 0")
    return replace(attention, rotary_dim=rotary_dim, output_gate=True)


def gated_delta(config: Keys, grouped: bool) -> GatedDeltaSpec:
    """The recurrent layers' sizes; defaults are transformers'."""
    k_heads = integer(config, "linear_num_key_heads", default=16)
    v_heads = integer(config, "linear_num_value_heads", default=32)
    if v_heads % k_heads:
        raise wrong("linear_num_value_heads", v_heads, f"must be a multiple of linear_num_key_heads ({k_heads})")
    k_dim = integer(config, "linear_key_head_dim", high=65536, default=128)
    v_dim = integer(config, "linear_value_head_dim", high=65536, default=128)
    width = integer(config, "linear_conv_kernel_dim", low=2, high=64, default=4)
    return GatedDeltaSpec(k_heads, v_heads, k_dim, v_dim, width, grouped)


def _parse(architecture: str, config: Keys) -> ModelSpec:
    return hybrid(architecture, config, grouped=True)


QWEN3_NEXT = Family("qwen3_next", _parse, (Dialect(_DENSE, HUB.experts), Dialect(_DENSE, FUSED.experts)))
