"""Checkpoints of any size that cost nothing: files of zeros with holes, but for the scales that must not be zero."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from copyengine.checkpoint.directory import INDEX
from copyengine.checkpoint.header import ITEMSIZE
from copyengine.checkpoint.random_model import Sizes, _shards, model_config
from copyengine.checkpoint.shard_file import Output, _header
from copyengine.families import parse_spec

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]}
SPELLING = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_sparse_checkpoint(directory: Path, sizes: Sizes, dtype: str, quantised: bool = False) -> list[Path]:
    """A checkpoint of `dtype`, its experts as NVFP4 if `quantised`; its weight files. `directory` is made."""
    directory.mkdir()
    config: dict[str, Any] = model_config(sizes, dtype)
    shards = _shards(parse_spec(config), sizes)
    weight_map: dict[str, str] = {}
    paths: list[Path] = []
    for number, shard in enumerate(shards):
        outputs: list[Output] = []
        for name, shape in shard:
            if quantised and ".experts." in name:
                outputs += _nvfp4(name.removesuffix(".weight"), *shape)
            else:
                outputs.append(_output(name, SPELLING[dtype], shape))
        paths.append(directory / f"part{number}.safetensors")
        _write(paths[-1], outputs)
        weight_map |= {output.name: paths[-1].name for output in outputs}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config | ({"quantization_config": NVFP4} if quantised else {})))
    return paths


def _nvfp4(stem: str, rows: int, columns: int) -> list[Output]:
    return [
        _output(f"{stem}.weight", "U8", (rows, columns // 2)),
        _output(f"{stem}.weight_scale", "F8_E4M3", (rows, columns // 16)),
        _output(f"{stem}.weight_scale_2", "F32", ()),
    ]


def _output(name: str, dtype: str, shape: tuple[int, ...]) -> Output:
    return Output(name, dtype, shape, int(np.prod(shape, dtype=int)) * ITEMSIZE[dtype])


def _write(path: Path, outputs: list[Output]) -> None:
    header, offsets = _header(outputs)
    with open(path, "wb") as file:
        file.write(header)
        for output in outputs:
            if output.shape == ():
                file.seek(offsets[output.name])
                file.write(np.float32(1).tobytes())
        file.truncate(len(header) + sum(output.nbytes for output in outputs))
