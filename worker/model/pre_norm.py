"""Families of pre-norm layers of attention and a dense or routed MLP on one residual of H: Qwen3, Qwen3-MoE, Qwen2-MoE,
Mixtral, OLMoE."""

from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from worker.kv import KvCache
from worker.model.attention import GqaAttention
from worker.model.mlp import DenseMlp
from worker.model.moe import Experts, MoeFfn
from worker.model.rotary import Rotary
from worker.model.stack import Block, Decoder, Norm, PreNormResidual, Weights

Rotaries = dict[tuple[RopeSpec, int], Rotary]
"""Layers that share one share a step's angles."""


def build_pre_norm(spec: ModelSpec, weights: Weights, kv: KvCache, experts: Experts | None) -> Decoder:
    """The model; takes its tensors out of `weights`. KeyError if one is not there."""
    embed = weights.pop("embed")
    blocks: list[Block] = []
    rotaries: Rotaries = {}
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}"
        attention = _attention(spec, layer, index, weights, kv, rotaries)
        blocks.append(PreNormResidual(Norm(weights.pop(f"{prefix}.input_norm"), spec.norm_eps), attention))
        ffn = _ffn(spec, layer, index, weights, experts)
        blocks.append(PreNormResidual(Norm(weights.pop(f"{prefix}.ffn_norm"), spec.norm_eps), ffn))
    head = embed if spec.tie_word_embeddings else weights.pop("head")
    return Decoder(embed, blocks, Norm(weights.pop("final_norm"), spec.norm_eps), head)


def _attention(
    spec: ModelSpec, layer: LayerSpec, index: int, weights: Weights, kv: KvCache, rotaries: Rotaries
) -> Block:
    prefix = f"layers.{index}.attention"
    match layer.attention:
        case GqaSpec(rope=rope, head_dim=head_dim) as gqa:
            if (rope, head_dim) not in rotaries:
                rotaries[rope, head_dim] = Rotary(rope, head_dim, kv.device)
            return GqaAttention(gqa, weights, prefix, kv.layers[index], rotaries[rope, head_dim], spec.norm_eps)


def _ffn(spec: ModelSpec, layer: LayerSpec, index: int, weights: Weights, experts: Experts | None) -> Block:
    match layer.ffn:
        case DenseSpec():
            return DenseMlp(weights, f"layers.{index}.ffn")
        case MoeSpec() as moe:
            if experts is None:
                raise ValueError(f"layer {index} has experts, but no pool was given")
            return MoeFfn(moe, weights, f"layers.{index}", spec.moe_layers.index(index), experts)
