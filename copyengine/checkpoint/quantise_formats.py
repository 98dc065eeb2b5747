"""What checkpoints can be made: the formats, and whose spelling of each."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from copyengine.checkpoint.schemes import (
    COMPRESSED_MXFP4,
    COMPRESSED_TENSORS,
    FUSED_MXFP4,
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
        "mxfp4": {"compressed-tensors": lambda *_: COMPRESSED_MXFP4, "gpt-oss": lambda *_: FUSED_MXFP4},
    }
)
"""By format and dialect, the usual dialect first: the scheme, of rows and columns of a block."""

BLOCK = (128, 128)
"""Of fp8_block, if nothing else is asked for."""

MOST = 1 << 20
"""Rows and columns of a block."""


def scheme_of(name: str, dialect: str | None, block: str | None, spelt: Callable[[Scheme], bool]) -> Scheme:
    """What the command line asks for: a format, maybe a dialect and "ROWS,COLUMNS". ConfigError if there is no such.

    Without a dialect it is the first that is `spelt` by the files of the family; the first of all if none is.
    """
    known = FORMATS[name]
    if dialect is not None and dialect not in known:
        raise ConfigError(f"--dialect {dialect}: {name} is written as {' or '.join(known)}")
    if block is not None and name != "fp8_block":
        raise ConfigError(f"--block {block}: {name} has blocks of one size; leave it out")
    schemes = {key: make(*_sizes(block)) for key, make in known.items()}
    if dialect is not None:
        return schemes[dialect]
    return next(filter(spelt, schemes.values()), next(iter(schemes.values())))


def _sizes(block: str | None) -> tuple[int, int]:
    if block is None:
        return BLOCK
    sizes = block.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and 0 < int(size) <= MOST for size in sizes):
        raise ConfigError(f"--block {block}: must be two numbers from 1 to {MOST}, such as 128,128")
    return int(sizes[0]), int(sizes[1])


def dialects() -> str:
    """For people."""
    return "; ".join(f"{name} as {' or '.join(dialects)}" for name, dialects in FORMATS.items())
