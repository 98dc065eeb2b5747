"""The files beside the weights of a checkpoint whose experts were quantised from another one's."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from copyengine.checkpoint.directory import INDEX, read_config
from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.quantise_plan import Quantised, Shard
from copyengine.checkpoint.schemes import FUSED_MXFP4, MODELOPT, WEIGHT, Scheme, fp8_block
from copyengine.families.packed_groups import (
    FP8_FORMAT,
    FP8_WEIGHTS,
    MXFP4_FORMAT,
    MXFP4_WEIGHTS,
    PACKED_FORMAT,
    PACKED_WEIGHTS,
)
from kernels.formats import NVFP4_BLOCK

COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
    "*.tiktoken", "generation_config.json", "LICENSE*",
)  # fmt: skip
"""What is copied as it is."""


def write_texts(
    target: Path, source: Path, scheme: Scheme, refs: Mapping[str, TensorRef], shards: Sequence[Shard]
) -> None:
    """Write index and config.json into `target`, which holds `shards` made of `source`, whose tensors are `refs`; copy
    what belongs to the tokenizer. config.json comes last: a directory that has one is complete."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    weight_map = {output.name: shard.name for shard in shards for output in shard.outputs}
    _write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    quantised = [job for shard in shards for job in shard.jobs if isinstance(job, Quantised)]
    experts = {linear.source for job in quantised for linear in job.linears}
    left_out = [name for name, ref in refs.items() if name not in experts and len(ref.shape) == 2]
    ignored = sorted(name.removesuffix(f".{WEIGHT}") for name in left_out if name.endswith(f".{WEIGHT}"))
    _write_json(target / "config.json", {**read_config(source), "quantization_config": quantisation(scheme, ignored)})


def quantisation(scheme: Scheme, ignored: Sequence[str]) -> dict[str, object]:
    """quantization_config as the tool states it whose scheme it is; the linears `ignored` are not quantised."""
    if scheme is MODELOPT:
        weights: dict[str, object] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        tool: dict[str, object] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4_BLOCK}
        return {**tool, "config_groups": groups, "ignore": list(ignored)}
    if scheme == fp8_block(*scheme.block):
        tool = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**tool, "weight_block_size": list(scheme.block), "modules_to_not_convert": list(ignored)}
    if scheme is FUSED_MXFP4:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}
    packing, stated = _packed(scheme)
    group: dict[str, object] = {"weights": {**stated, "dynamic": False, "symmetric": True}, "targets": ["Linear"]}
    group |= {"input_activations": None, "output_activations": None}
    tool = {"quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed"}
    return {**tool, "config_groups": {"group_0": group}, "ignore": list(ignored)}


def _packed(scheme: Scheme) -> tuple[str, Keys]:
    """What compressed-tensors calls a format and states of its weights."""
    if scheme.format == "nvfp4":
        return PACKED_FORMAT, PACKED_WEIGHTS
    if scheme.format == "mxfp4":
        return MXFP4_FORMAT, MXFP4_WEIGHTS
    return FP8_FORMAT, {**FP8_WEIGHTS, "strategy": "block", "block_structure": list(scheme.block)}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_bytes((json.dumps(value, indent=2) + "\n").encode())
