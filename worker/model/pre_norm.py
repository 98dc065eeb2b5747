"""Families of pre-norm layers of attention and a dense or routed MLP on one residual of H: Qwen3, Qwen3-MoE, Qwen2-MoE,
Mixtral, OLMoE, Qwen3-Next, Qwen3.5-MoE, gpt-oss, DeepSeek-V3."""

from copyengine.model_spec import DenseSpec, GatedDeltaSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec
from worker.kv import KvCache
from worker.model.attention import GqaAttention
from worker.model.gated_delta import GatedDelta
from worker.model.mla import MlaAttention
from worker.model.mlp import DenseMlp
from worker.model.moe import Experts, MoeFfn
from worker.model.operations import Operations
from worker.model.rotary import Rotary
from worker.model.stack import Block, Decoder, Norm, PreNormResidual, Weights
from worker.state import StateSlots

Rotaries = dict[tuple[RopeSpec, int], Rotary]
"""Layers that share one share a step's angles."""


def build_pre_norm(
    spec: ModelSpec,
    weights: Weights,
    kv: KvCache,
    experts: Experts | None,
    states: StateSlots | None,
    operations: Operations,
) -> Decoder:
    """The model; takes its tensors out of `weights`. KeyError if one is not there."""

    def norm(name: str) -> Norm:
        return Norm(weights.pop(name), spec.norm_eps, spec.zero_centred_norms)

    embed = weights.pop("embed")
    blocks: list[Block] = []
    rotaries: Rotaries = {}
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}"
        attention = _attention(spec, layer, index, weights, kv, rotaries, states, operations)
        blocks.append(PreNormResidual(norm(f"{prefix}.input_norm"), attention))
        ffn = _ffn(spec, layer, index, weights, experts, operations)
        blocks.append(PreNormResidual(norm(f"{prefix}.ffn_norm"), ffn))
    head = embed if spec.tie_word_embeddings else weights.pop("head")
    return Decoder(embed, blocks, norm("final_norm"), head, operations)


def _attention(
    spec: ModelSpec,
    layer: LayerSpec,
    index: int,
    weights: Weights,
    kv: KvCache,
    rotaries: Rotaries,
    states: StateSlots | None,
    operations: Operations,
) -> Block:
    match layer.attention:
        case GqaSpec(rope=rope) as gqa:
            rotary = _rotary(rope, gqa.rotary_dim or gqa.head_dim, kv, rotaries)
            prefix, norms = f"layers.{index}.attention", (spec.norm_eps, spec.zero_centred_norms)
            return GqaAttention(gqa, weights, prefix, kv.of_layer(index), rotary, *norms, operations)
        case GatedDeltaSpec() as delta:
            if states is None:
                raise ValueError(f"layer {index} has a recurrent state, but no slots were given")
            prefix = f"layers.{index}.delta"
            return GatedDelta(delta, weights, prefix, states.layers[index], spec.norm_eps, operations)
        case MlaSpec(rope=rope, rope_dim=rope_dim) as mla:
            rotary = _rotary(rope, rope_dim, kv, rotaries)
            return MlaAttention(mla, weights, f"layers.{index}.attention", kv.of_layer(index), rotary, operations)


def _rotary(rope: RopeSpec, head_dim: int, kv: KvCache, rotaries: Rotaries) -> Rotary:
    if (rope, head_dim) not in rotaries:
        rotaries[rope, head_dim] = Rotary(rope, head_dim, kv.device)
    return rotaries[rope, head_dim]


def _ffn(
    spec: ModelSpec,
    layer: LayerSpec,
    index: int,
    weights: Weights,
    experts: Experts | None,
    operations: Operations,
) -> Block:
    match layer.ffn:
        case DenseSpec():
            return DenseMlp(weights, f"layers.{index}.ffn", operations)
        case MoeSpec() as moe:
            if experts is None:
                raise ValueError(f"layer {index} has experts, but no pool was given")
            return MoeFfn(moe, weights, f"layers.{index}", spec.moe_layers.index(index), experts, operations)
