"""What checkpoints can be made: the formats, and whose spelling of each."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from copyengine.checkpoint.schemes import (
    COMPRESSED_MXFP4,
    COMPRESSED_TENSORS,
    MODELOPT,
    Scheme,
    compressed_fp8_block,
    fp8_block,
)
from copyengine.wire.errors import ConfigError

FORMATS: Mapping[str, Mapping[str, Callable[[int, int], Scheme]]] = MappingProxyType(
    {
        "nvfp4": {"modelopt": lambda *_: MODELOPT, "compressed-tensors": lambda *_: COMPRESSED_TENSORS},
        "fp8_block": {"fp8": fp8_block, "compressed-tensors": compressed_fp8_block},
        "mxfp4": {"compressed-tensors": lambda *_: COMPRESSED_MXFP4},
    }
)
"""By format and dialect, the usual dialect first: the scheme, of rows and columns of a block."""

BLOCK = (128, 128)
"""Of fp8_block, if nothing else is asked for."""

MOST = 1 << 20
"""Rows and columns of a block."""


def scheme_of(name: str, dialect: str | None, block: str | None) -> Scheme:
    """What the command line asks for: a format, maybe a dialect and "ROWS,COLUMNS". ConfigError if there is no such."""
    known = FORMATS[name]
    make = known.get(dialect or next(iter(known)))
    if make is None:
        raise ConfigError(f"--dialect {dialect}: {name} is written as {' or '.join(known)}")
    if block is None:
        return make(*BLOCK)
    sizes = block.split(",")
    if name != "fp8_block":
        raise ConfigError(f"--block {block}: {name} has blocks of one size; leave it out")
    if len(sizes) != 2 or not all(size.isdecimal() and 0 < int(size) <= MOST for size in sizes):
        raise ConfigError(f"--block {block}: must be two numbers from 1 to {MOST}, such as 128,128")
    return make(int(sizes[0]), int(sizes[1]))


def dialects() -> str:
    """For people."""
    return "; ".join(f"{name} as {' or '.join(dialects)}" for name, dialects in FORMATS.items())
