"""Family: DeepSeek-V3 (R1, and what else has its architecture): latent attention, grouped sigmoid routing, experts that
are shared without a gate. Layers for predicting further tokens (MTP) are not used."""

import math
from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, flag, integer, nested, number, wrong
from copyengine.checkpoint.names import Dialect
from copyengine.families.decoder import MAX_EXPERTS, decoder, layer_count, moe
from copyengine.families.family import Family
from copyengine.families.qwen3 import DENSE_NAMES, FUSED, HUB
from copyengine.families.rope import rope
from copyengine.model_spec import DenseSpec, GroupedRouting, LayerSpec, MlaSpec, ModelSpec, MoeSpec

_OWN = {
    "layers.{i}.attention.q_a": "model.layers.{i}.self_attn.q_a_proj.weight",
    "layers.{i}.attention.q_a_bias": "model.layers.{i}.self_attn.q_a_proj.bias",
    "layers.{i}.attention.q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "layers.{i}.attention.q_b": "model.layers.{i}.self_attn.q_b_proj.weight",
    "layers.{i}.attention.kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{i}.attention.kv_a_bias": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias",
    "layers.{i}.attention.kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "layers.{i}.attention.kv_b": "model.layers.{i}.self_attn.kv_b_proj.weight",
    "layers.{i}.score_router": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.score_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "layers.{i}.shared.gate": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
    "layers.{i}.shared.up": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
    "layers.{i}.shared.down": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
}
_DENSE = MappingProxyType(DENSE_NAMES | _OWN)


def _parse(architecture: str, config: Keys) -> ModelSpec:
    attention, count = _attention(config), layer_count(config)
    first = integer(config, "first_k_dense_replace", low=0, default=3)
    dense = DenseSpec(integer(config, "intermediate_size")) if first else None
    routed = _routed(config) if first < count else None
    ffns = [routed if i >= first else dense for i in range(count)]
    return decoder(architecture, config, tuple(LayerSpec(attention, ffn) for ffn in ffns if ffn is not None))


def _attention(config: Keys) -> MlaSpec:
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise wrong("num_key_value_heads", kv_heads, f"must be num_attention_heads ({heads}): keys are made per head")
    nope, rotated = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    if rotated % 2:
        raise wrong("qk_rope_head_dim", rotated, "must be even for rotary embeddings")
    return MlaSpec(
        heads=heads,
        rank=integer(config, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=integer(config, "v_head_dim"),
        scale=(nope + rotated) ** -0.5 * _temperature(config) ** 2,
        rope=rope(config, rotated),
        q_rank=0 if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        bias=flag(config, "attention_bias"),
        interleaved=flag(config, "rope_interleave", default=True),
    )


def _temperature(config: Keys) -> float:
    """What a context beyond the trained length multiplies q and k with: transformers' yarn_apply_mscale."""
    scaling = {**nested(config, "rope_parameters"), **nested(config, "rope_scaling")}
    if (scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        return 1.0
    mscale = number(scaling, "mscale_all_dim", default=0.0)
    factor = number(scaling, "factor", default=1.0)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _routed(config: Keys) -> MoeSpec:
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key) not in (None, known):
            raise wrong(key, config[key], f"only {known} is supported")
    experts = integer(config, "n_routed_experts", "num_local_experts", high=MAX_EXPERTS)
    groups = integer(config, "n_group", default=8)
    taken = integer(config, "topk_group", default=4)
    if experts % groups or (taken < groups and experts < 2 * groups):
        raise wrong("n_group", groups, f"must divide the {experts} experts into groups of two at least")
    if taken > groups:
        raise wrong("topk_group", taken, f"must be at most n_group ({groups})")
    routed = moe(config, experts)
    if routed.experts_per_token > experts // groups * taken:
        raise wrong("num_experts_per_tok", routed.experts_per_token, f"{taken} of {groups} groups have fewer experts")
    return replace(
        routed,
        norm_topk_prob=flag(config, "norm_topk_prob", default=True),
        shared_intermediate=integer(config, "n_shared_experts", low=0, default=1) * routed.intermediate,
        shared_gate=False,
        grouped=GroupedRouting(groups, taken, number(config, "routed_scaling_factor", default=2.5)),
    )


DEEPSEEK_V3 = Family("deepseek_v3", _parse, (Dialect(_DENSE, HUB.experts), Dialect(_DENSE, FUSED.experts)))
