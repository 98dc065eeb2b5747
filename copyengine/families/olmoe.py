"""Family: OLMoE: Qwen3-MoE's tensors, with q and k normalised over all heads at once."""

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, number
from copyengine.families.decoder import decoder, expert_count, gqa, layer_count, moe
from copyengine.families.family import Family
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.families.windows import no_windows
from copyengine.model_spec import LayerSpec, ModelSpec


def _parse(architecture: str, config: Keys) -> ModelSpec:
    """Experts are of `intermediate_size`, in every layer."""
    attention = gqa(config, default_head_dim=None, qk_norm=True)
    no_windows(config, layer_count(config))
    clip = None if config.get("clip_qkv") is None else number(config, "clip_qkv")
    layer = LayerSpec(
        replace(attention, wide_qk_norm=True, clip_qkv=clip), moe(config, expert_count(config), "intermediate_size")
    )
    return decoder(architecture, config, (layer,) * layer_count(config), norm_eps=1e-5)


OLMOE = Family("olmoe", _parse, (HUB, FUSED))
