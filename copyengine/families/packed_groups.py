"""config_groups of compressed-tensors: which linears are written in which scheme."""

from collections.abc import Mapping

from msgspec import Struct

from copyengine.checkpoint.keys import Keys, nested, show
from copyengine.checkpoint.schemes import (
    COMPRESSED_FP8,
    COMPRESSED_FP8_CHANNEL,
    COMPRESSED_MXFP4,
    COMPRESSED_TENSORS,
    Scheme,
    compressed_fp8_block,
)
from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

PACKED_FORMAT = "nvfp4-pack-quantized"
PACKED_WEIGHTS: Keys = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_BLOCK}
"""What compressed-tensors states of NVFP4 weights, apart from what may be left out."""

MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_WEIGHTS: Keys = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_BLOCK}
FP8_FORMAT = "float-quantized"
FP8_WEIGHTS: Keys = {"num_bits": 8, "type": "float"}

ALL_LINEARS = ("Linear", "re:.*")
"""Targets that are every linear."""


class GroupsError(ValueError):
    """config_groups are of a kind that is not known; the text says what of which group."""


class Packed(Struct, frozen=True):
    """One group of linears."""

    targets: list[str]  # as of module_patterns; "*" for all
    scheme: Scheme
    quantised_inputs: bool  # activations in FP4, as the weights


def packed_groups(stated: Keys) -> list[Packed]:
    """All groups of a quantization_config. GroupsError for one that is not known, ConfigError for what is no group."""
    groups = nested(stated, "config_groups")
    if not groups:
        raise GroupsError("no config_groups")
    return [_group(name, nested(groups, name), stated) for name in groups]


def _group(name: str, group: Keys, stated: Keys) -> Packed:
    packing = group.get("format") or stated.get("format")
    weights = nested(group, "weights")
    scheme = _scheme(name, packing, weights)
    targets = group.get("targets") or ["Linear"]
    if not isinstance(targets, list) or any(not isinstance(target, str) for target in targets):
        raise GroupsError(f"{name} with targets {show(targets)}")
    inputs = group.get("input_activations")
    quantised = isinstance(inputs, Mapping) and inputs.get("num_bits") == 4 and scheme is COMPRESSED_TENSORS
    return Packed(["*" if target in ALL_LINEARS else target for target in targets], scheme, quantised)


def _scheme(name: str, packing: object, weights: Keys) -> Scheme:
    match packing:
        case "nvfp4-pack-quantized":
            _expect(f"{packing}, {name}", weights, PACKED_WEIGHTS)
            return COMPRESSED_TENSORS
        case "mxfp4-pack-quantized":
            _expect(f"{packing}, {name}", weights, MXFP4_WEIGHTS)
            return COMPRESSED_MXFP4
        case "float-quantized":
            _expect(f"{packing}, {name}", weights, FP8_WEIGHTS)
            return _fp8(name, weights)
    raise GroupsError(f"{name} with format {show(packing)}")


def _fp8(name: str, weights: Keys) -> Scheme:
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    match strategy:
        case "tensor":
            return COMPRESSED_FP8
        case "channel":
            return COMPRESSED_FP8_CHANNEL
        case "block":
            if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
                return compressed_fp8_block(*block)
            raise GroupsError(f"{name} with block_structure {show(block)}, not two numbers of at least 1")
    raise GroupsError(f"{name} with strategy {show(strategy)}, not 'tensor', 'channel' or 'block'")


def _expect(where: str, weights: Keys, wanted: Keys) -> None:
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise GroupsError(f"{where} with {key} {show(weights.get(key))}, not {value!r}")
