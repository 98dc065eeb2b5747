"""Random weights for a ModelSpec: large enough that logits and routing differ from token to token."""

import numpy as np
import torch
from numpy.typing import NDArray

from copyengine.model_spec import DenseSpec, LayerSpec, ModelSpec
from kernels.formats import RecordLayout
from tests.gqa_layers import gqa_of
from tests.worker.resident_experts import aligned

STD = 0.3


def random_weights(spec: ModelSpec, seed: int = 4) -> dict[str, torch.Tensor]:
    """Dense weights in float32 by canonical name, of a model without biases and with tied embeddings."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden), "final_norm": (spec.hidden,)}
    for i, layer in enumerate(spec.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(layer, spec.hidden).items()}
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=generator) * STD
        for name, shape in shapes.items()
    }


def random_bank(record: RecordLayout, experts: int, dtype: torch.dtype, seed: int) -> NDArray[np.uint8]:
    """[E, record_nbytes] uint8 of random experts, on a 128-byte boundary."""
    generator = torch.Generator().manual_seed(seed)
    bank = aligned(experts * record.record_nbytes).reshape(experts, record.record_nbytes)
    for field in record.fields:
        values = (torch.randn(experts, *field.shape, generator=generator) * STD).to(dtype)
        bank[:, field.offset : field.offset + field.nbytes] = values.view(torch.uint8).reshape(experts, -1).numpy()
    return bank


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    gqa = gqa_of(layer)
    q, kv = gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attention.q": (q, hidden),
        "attention.k": (kv, hidden),
        "attention.v": (kv, hidden),
        "attention.o": (hidden, q),
        "attention.q_norm": (gqa.head_dim,),
        "attention.k_norm": (gqa.head_dim,),
    }
    if isinstance(layer.ffn, DenseSpec):
        wide, narrow = (layer.ffn.intermediate, hidden), (hidden, layer.ffn.intermediate)
        return shapes | {"ffn.gate": wide, "ffn.up": wide, "ffn.down": narrow}
    return shapes | {"router": (layer.ffn.experts, hidden)}
