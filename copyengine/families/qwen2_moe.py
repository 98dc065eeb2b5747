"""Family: Qwen2-MoE: routed experts and a shared one beside them."""

from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, flag, integer
from copyengine.checkpoint.names import Dialect
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, mixed_layers, moe, sparse_layers
from copyengine.families.family import Family
from copyengine.families.qwen3 import DENSE_NAMES, FUSED, HUB
from copyengine.families.windows import layer_windows, window_if_used, with_windows
from copyengine.model_spec import ModelSpec

_SHARED = {
    "layers.{i}.shared.gate": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
    "layers.{i}.shared.up": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
    "layers.{i}.shared.down": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
    "layers.{i}.shared_gate": "model.layers.{i}.mlp.shared_expert_gate.weight",
}
DENSE = MappingProxyType(DENSE_NAMES | _SHARED)


def _parse(architecture: str, config: Keys) -> ModelSpec:
    """The projections of q, k and v have biases unless `qkv_bias` says no; that of the output has none.

    Windows, if they are used, in every second layer below `max_window_layers`, unless `layer_types` says where.
    """
    attention = gqa(config, default_head_dim=None, qk_norm=False)
    attention = replace(attention, qkv_bias=flag(config, "qkv_bias", default=True), o_bias=False)
    count, experts = layer_count(config), expert_count(config)
    sparse = sparse_layers(config, count, experts)
    routed = None
    if any(sparse):
        routed = replace(moe(config, experts), shared_intermediate=integer(config, "shared_expert_intermediate_size"))
    size, last = window_if_used(config), integer(config, "max_window_layers", low=0, default=28)
    sliding = [size is not None and i % 2 == 0 and i < last for i in range(count)]
    attentions = with_windows(attention, layer_windows(config, size, sliding, by_layer=True))
    return decoder(architecture, config, mixed_layers(config, attentions, sparse, routed))


QWEN2_MOE = Family("qwen2_moe", _parse, (Dialect(DENSE, HUB.experts), Dialect(DENSE, FUSED.experts)))
