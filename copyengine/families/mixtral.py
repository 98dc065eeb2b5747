"""Family: Mixtral."""

from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import Dialect, ExpertTensor
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, moe
from copyengine.families.family import Family
from copyengine.families.qwen3 import DENSE_NAMES, FUSED
from copyengine.families.windows import layer_windows, window, with_windows
from copyengine.model_spec import LayerSpec, ModelSpec

_HUB = Dialect(
    MappingProxyType(DENSE_NAMES | {"layers.{i}.router": "model.layers.{i}.block_sparse_moe.gate.weight"}),
    (
        ExpertTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "gate_up", part=0, parts=2),
        ExpertTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "gate_up", part=1, parts=2),
        ExpertTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "down"),
    ),
)


def _parse(architecture: str, config: Keys) -> ModelSpec:
    """Experts are of `intermediate_size`, in every layer; the weights of the K chosen ones always sum to 1."""
    attention, size = gqa(config, default_head_dim=None, qk_norm=False), window(config, None)
    attentions = with_windows(attention, layer_windows(config, size, [size is not None] * layer_count(config)))
    routed = replace(moe(config, expert_count(config), "intermediate_size"), norm_topk_prob=True)
    return decoder(architecture, config, tuple(LayerSpec(a, routed) for a in attentions), norm_eps=1e-5)


MIXTRAL = Family("mixtral", _parse, (_HUB, FUSED))
