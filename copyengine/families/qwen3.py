"""Family: Qwen3 and Qwen3-MoE."""

from types import MappingProxyType

from copyengine.checkpoint.keys import Keys, integer
from copyengine.checkpoint.names import Dialect, ExpertTensor
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, mixed_layers, moe, sparse_layers
from copyengine.families.family import Family
from copyengine.families.windows import layer_windows, window_if_used, with_windows
from copyengine.model_spec import DenseSpec, LayerSpec, ModelSpec

DENSE_NAMES = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
        "layers.{i}.input_norm": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.attention.o": "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.attention.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
        "layers.{i}.attention.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
        "layers.{i}.attention.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
        "layers.{i}.attention.o_bias": "model.layers.{i}.self_attn.o_proj.bias",
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.router": "model.layers.{i}.mlp.gate.weight",
        "layers.{i}.ffn.gate": "model.layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.ffn.up": "model.layers.{i}.mlp.up_proj.weight",
        "layers.{i}.ffn.down": "model.layers.{i}.mlp.down_proj.weight",
    }
)

HUB = Dialect(
    DENSE_NAMES,
    (
        ExpertTensor("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "gate_up", part=0, parts=2),
        ExpertTensor("model.layers.{i}.mlp.experts.{e}.up_proj.weight", "gate_up", part=1, parts=2),
        ExpertTensor("model.layers.{i}.mlp.experts.{e}.down_proj.weight", "down"),
    ),
)
"""The files of the hub."""

FUSED = Dialect(
    DENSE_NAMES,
    (
        ExpertTensor("model.layers.{i}.mlp.experts.gate_up_proj", "gate_up"),
        ExpertTensor("model.layers.{i}.mlp.experts.down_proj", "down"),
    ),
)
"""A layer's experts in one tensor each of gate and up, and of down, as transformers 5 holds them."""


def _parse_dense(architecture: str, config: Keys) -> ModelSpec:
    """Windows, if they are used, from layer `max_window_layers` on, unless `layer_types` says where."""
    attention, dense = gqa(config, default_head_dim=128, qk_norm=True), DenseSpec(integer(config, "intermediate_size"))
    count, size = layer_count(config), window_if_used(config)
    first = integer(config, "max_window_layers", low=0, default=28)
    windows = layer_windows(config, size, [size is not None and i >= first for i in range(count)], by_layer=True)
    return decoder(architecture, config, tuple(LayerSpec(a, dense) for a in with_windows(attention, windows)))


def _parse_moe(architecture: str, config: Keys) -> ModelSpec:
    """Windows, if they are used, in all layers."""
    attention = gqa(config, default_head_dim=None, qk_norm=True)
    count, experts = layer_count(config), expert_count(config)
    sparse = sparse_layers(config, count, experts)
    routed = moe(config, experts) if any(sparse) else None
    size = window_if_used(config)
    attentions = with_windows(attention, layer_windows(config, size, [size is not None] * count))
    return decoder(architecture, config, mixed_layers(config, attentions, sparse, routed))


QWEN3 = Family("qwen3", _parse_dense, (HUB,))
QWEN3_MOE = Family("qwen3_moe", _parse_moe, (HUB, FUSED))
