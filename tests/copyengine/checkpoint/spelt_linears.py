"""Checkpoints in which all linears are quantised, in every spelling: by safetensors' own writer and kernels.quant."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from copyengine.checkpoint.random_model import Sizes
from kernels.quant import (
    Fp8Block,
    Matrix,
    Nvfp4,
    dequant,
    quant,
    quant_fp8_block,
    quant_fp8_tensor,
    quant_mxfp4,
)
from tests.copyengine.checkpoint.quantised_files import QUANTISATION, Tensors

SIZES = Sizes(
    layers=3, hidden=64, intermediate=32, experts=8, experts_per_token=3, heads=4, kv_heads=2, head_dim=16,
    vocab_size=200, dense_intermediate=96, dense_layers=(1,),
)  # fmt: skip
BLOCK = (24, 40)
"""Neither of which any size is a multiple of."""

Made = tuple[Tensors, Matrix]


class Spelling(NamedTuple):
    """How one tool writes a linear, and what it states in config.json."""

    config: dict[str, Any]
    make: Callable[[torch.Tensor], Made]
    scale: str  # suffix of the scales
    format: str  # of the records


def _packed(packing: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


def _modelopt(weight: torch.Tensor) -> Made:
    made = quant(weight)
    return {"weight": made.codes, "weight_scale": made.scales, "weight_scale_2": made.scale}, made


def _compressed(weight: torch.Tensor) -> Made:
    factor = 1 / quant(weight).scale
    made = quant(weight, float(1 / factor))
    fields = {"weight_packed": made.codes, "weight_scale": made.scales, "weight_global_scale": factor.reshape(1)}
    return fields, Nvfp4(made.codes, made.scales, 1 / factor)


def _mxfp4(weight: torch.Tensor) -> Made:
    made = quant_mxfp4(weight)
    return {"weight_packed": made.codes, "weight_scale": made.scales}, made


def _block(suffix: str) -> Callable[[torch.Tensor], Made]:
    def make(weight: torch.Tensor) -> Made:
        made = quant_fp8_block(weight, BLOCK)
        scales = made.scales.to(torch.bfloat16)  # as files may have them
        return {"weight": made.codes, suffix: scales}, Fp8Block(made.codes, scales.float(), BLOCK)

    return make


def _channel(weight: torch.Tensor) -> Made:
    made = quant_fp8_block(weight, (1, weight.shape[1]))
    return {"weight": made.codes, "weight_scale": made.scales}, made


def _tensor(shape: tuple[int, ...], suffix: str = "weight_scale") -> Callable[[torch.Tensor], Made]:
    def make(weight: torch.Tensor) -> Made:
        made = quant_fp8_tensor(weight)
        return {"weight": made.codes, suffix: made.scale.reshape(shape)}, made

    return make


_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
_NVFP4: dict[str, Any] = {"ignore": []}
SPELLINGS: Mapping[str, Spelling] = {
    "modelopt nvfp4": Spelling(QUANTISATION["modelopt"] | _NVFP4, _modelopt, "weight_scale", "nvfp4"),
    "packed nvfp4": Spelling(QUANTISATION["compressed-tensors"] | _NVFP4, _compressed, "weight_scale", "nvfp4"),
    "packed mxfp4": Spelling(
        _packed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32), _mxfp4, "weight_scale", "mxfp4"
    ),
    "fp8 block": Spelling(_BLOCKS, _block("weight_scale_inv"), "weight_scale_inv", "fp8_block"),
    "fp8 tensor": Spelling({"quant_method": "fp8"}, _tensor(()), "weight_scale", "fp8_tensor"),
    "fp8 tensor of transformers": Spelling(
        {"quant_method": "fp8", "weight_block_size": None},
        _tensor((), "weight_scale_inv"), "weight_scale_inv", "fp8_tensor",
    ),
    "modelopt fp8": Spelling(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, _tensor(()), "weight_scale", "fp8_tensor"
    ),
    "packed fp8 tensor": Spelling(
        _packed("float-quantized", strategy="tensor"), _tensor((1,)), "weight_scale", "fp8_tensor"
    ),
    "packed fp8 channel": Spelling(
        _packed("float-quantized", strategy="channel"), _channel, "weight_scale", "fp8_block"
    ),
    "packed fp8 block": Spelling(
        _packed("float-quantized", strategy="block", block_structure=list(BLOCK)),
        _block("weight_scale"), "weight_scale", "fp8_block",
    ),
}  # fmt: skip

_FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
PACKED_W4A4 = SPELLINGS["packed nvfp4"]._replace(
    config=_packed("nvfp4-pack-quantized", **_FOUR_BITS)
    | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": _FOUR_BITS, "input_activations": _FOUR_BITS}}}
)
"""Where activations are to be quantised too."""


class Spelt(NamedTuple):
    """A model's tensors as one tool writes them."""

    config: dict[str, Any]  # config.json
    tensors: Tensors
    matrices: dict[str, Matrix]  # by the linear's name
    plain: Tensors  # the same model, not quantised: float32 of what its linears are exactly


def is_linear(name: str) -> bool:
    """Whether tools quantise it: no norm, router or embedding."""
    return not name.endswith(("norm.weight", "mlp.gate.weight", "embed_tokens.weight"))


def spelt(source: Path, config: dict[str, Any], spelling: Spelling) -> Spelt:
    """The unquantised checkpoint in `source` with all linears quantised."""
    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    plain, matrices = dict(tensors), {}
    for name in filter(is_linear, list(tensors)):
        stem = name.removesuffix(".weight")
        fields, matrices[stem] = spelling.make(tensors.pop(name))
        tensors |= {f"{stem}.{suffix}": tensor.contiguous() for suffix, tensor in fields.items()}
        plain[name] = dequant(matrices[stem]).float()
    return Spelt({**config, "quantization_config": spelling.config}, tensors, matrices, plain)


DENSE = replace(SIZES, experts=0, layers=2, dense_layers=())
"""A model without experts."""
