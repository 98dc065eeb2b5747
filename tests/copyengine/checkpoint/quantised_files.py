"""Quantised checkpoints written with safetensors' own writer and kernels.quant, tensor by tensor, to be damaged."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from copyengine.checkpoint.random_model import Sizes, write_random_model
from kernels.quant import Nvfp4, quant

DialectName = Literal["modelopt", "compressed-tensors"]
DIALECTS: tuple[DialectName, ...] = ("modelopt", "compressed-tensors")

SIZES = Sizes(
    layers=3, hidden=32, intermediate=16, experts=5, experts_per_token=2, heads=2, kv_heads=1, head_dim=16,
    vocab_size=41, dense_intermediate=24, dense_layers=(1,),
)  # fmt: skip

QUANTISATION: dict[DialectName, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            }
        },
    },
}

Tensors = dict[str, torch.Tensor]


def quantised_tensors(dialect: DialectName, source: Path, shared: bool) -> tuple[Tensors, dict[str, Nvfp4]]:
    """All tensors of the unquantised checkpoint in `source` with its experts' linears quantised, and these by name.

    Gate and up are under one global if `shared`, else each is under its own.
    """
    tensors: Tensors = {}
    linears: dict[str, Nvfp4] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    weights = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        matrix = quant(weight)
        if shared and "down_proj" not in name:
            pair = (stem.rpartition(".")[0] + f".{part}_proj.weight" for part in ("gate", "up"))
            matrix = quant(weight, max(float(quant(weights[both]).scale) for both in pair))
        if dialect == "modelopt":
            fields = {"weight": matrix.codes, "weight_scale": matrix.scales, "weight_scale_2": matrix.scale}
        else:
            factor = 1 / matrix.scale  # what is read back is one over it, which may be another number
            matrix = quant(weight, float(1 / factor))
            fields = {"weight_packed": matrix.codes, "weight_scale": matrix.scales}
            fields["weight_global_scale"] = factor.reshape(1)
        tensors |= {f"{stem}.{suffix}": tensor.contiguous() for suffix, tensor in fields.items()}
        linears[stem] = matrix
    return tensors, linears


def write_checkpoint(directory: Path, config: dict[str, Any], *shards: Tensors) -> Path:
    """A checkpoint of these shards."""
    directory.mkdir()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        save_file(shard, directory / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Made:
    """A random checkpoint in `root` and its quantised tensors, to write as they are or changed."""

    def __init__(self, root: Path, dialect: DialectName, dtype: str = "bfloat16", shared: bool = False) -> None:
        self.root = root
        self.dialect = dialect
        self.source = root / "source"
        self.source.mkdir()
        write_random_model(self.source, SIZES, dtype=dtype)
        self.tensors, self.linears = quantised_tensors(dialect, self.source, shared)
        self.config = json.loads((self.source / "config.json").read_text())
        self.config["quantization_config"] = QUANTISATION[dialect]

    def write(self, *shards: Tensors) -> Path:
        """In one shard if no shards are given."""
        return write_checkpoint(self.root / "quantised", self.config, *(shards or (self.tensors,)))
