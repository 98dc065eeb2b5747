"""The reads that fill the banks, in the order of the files: runs of bytes, and where in which record they go."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path

from msgspec import Struct

from copyengine.checkpoint.checks import DTYPES
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.rearrange import AS_IT_IS, Order
from copyengine.checkpoint.schemes import Kind
from kernels.formats import RecordLayout

FIELD_DTYPES = {**DTYPES, "U8": "uint8", "F8_E8M0": "uint8", "F8_E4M3": "float8_e4m3"}
"""safetensors' spelling -> ours, of the element types that the tensors of experts may have."""

NEAR_NBYTES = 64 << 10
"""Pieces of a file with no more than this between them are read in one go where it is read directly."""

GAP_NBYTES = 4 << 10
"""... and in one call through the page cache. Scales that a load has no use for lie between those that it has."""

RUN_NBYTES = 4 << 20
"""Of pieces that are read in one call, unless it is a single one: so that they are looked at before they have left the
processor's cache."""

RUN_PIECES = 256
"""In one call at most: with what is between them fewer than the 1,024 places that systems take."""


class Piece(Struct, frozen=True, gc=False):
    """One contiguous run of file bytes and the bank bytes that it fills."""

    path: Path
    offset: int
    nbytes: int
    dtype: str  # in the file
    field_dtype: str
    bank: int
    expert: int
    start: int  # byte in the record
    stop: int
    source: str
    kind: Kind
    order: Order
    rows: int  # of the field's part

    @property
    def end(self) -> int:
        """In the file."""
        return self.offset + self.nbytes

    @property
    def is_straight(self) -> bool:
        """Whether the file has the bytes of the field."""
        return self.dtype == self.field_dtype and self.order == AS_IT_IS


def pieces_of(model: Model, layout: RecordLayout) -> list[Piece]:
    """What fills the banks with the experts as `layout` places them, in the order of the files.

    Of a large model they are 150,000 and more, made while nothing is read yet.
    """
    by_path: dict[Path, list[Piece]] = {}
    place_of = cache(partial(_place, layout))
    for entry, ref in model.experts:
        start, stop, field_dtype, rows = place_of(entry.field, entry.part, entry.parts)
        pieces = by_path.setdefault(ref.path, [])
        dtypes = (FIELD_DTYPES[ref.dtype], field_dtype)
        what = (entry.source, entry.kind)
        if entry.expert is not None:
            place = (entry.bank, entry.expert, start, stop)
            pieces.append(Piece(ref.path, ref.offset, ref.nbytes, *dtypes, *place, *what, order=entry.order, rows=rows))
            continue
        nbytes = ref.nbytes // entry.shape[0]
        for expert in range(entry.shape[0]):
            place = (entry.bank, expert, start, stop)
            offset = ref.offset + expert * nbytes
            pieces.append(Piece(ref.path, offset, nbytes, *dtypes, *place, *what, order=entry.order, rows=rows))
    for pieces in by_path.values():
        pieces.sort(key=attrgetter("offset"))
    return list(chain.from_iterable(by_path[path] for path in sorted(by_path)))


def _place(layout: RecordLayout, name: str, part: int, parts: int) -> tuple[int, int, str, int]:
    """Of part `part` of a field: its first byte in the record, the one behind its last, element type, rows."""
    field = layout.field(name)
    nbytes = field.nbytes // parts
    start = field.offset + part * nbytes
    return start, start + nbytes, field.dtype, field.shape[0] // parts if field.shape else 1


def batches(pieces: Sequence[Piece], most_nbytes: int) -> Iterator[Sequence[Piece]]:
    """`pieces` cut into parts of about `most_nbytes` of one file."""
    low = nbytes = 0
    for i, (left, right) in enumerate(pairwise(pieces)):
        nbytes += left.nbytes
        if nbytes >= most_nbytes or (left.path is not right.path and left.path != right.path):
            yield pieces[low : i + 1]
            low, nbytes = i + 1, 0
    if pieces:
        yield pieces[low:]


def runs(batch: Sequence[Piece]) -> Iterator[tuple[Sequence[Piece], int]]:
    """`batch` cut into what one call reads, pieces that follow each other closely and need no change, or one; with each
    how far the file will be read on behind it."""
    stops = _stops(batch)
    straight = [piece.is_straight for piece in batch]
    low = nbytes = 0
    for i, piece in enumerate(batch, start=1):
        nbytes += piece.nbytes
        if i < len(batch) and nbytes < RUN_NBYTES and i - low < RUN_PIECES and straight[i - 1] and straight[i]:
            gap = batch[i].offset - piece.offset - piece.nbytes
            if 0 <= gap <= GAP_NBYTES:
                continue
        yield batch[low:i], stops[low]
        low, nbytes = i, 0


def _stops(batch: Sequence[Piece]) -> list[int]:
    """For each piece the end of the last of those behind it in the file that follow each other closely."""
    stops: list[int] = []
    start = stop = 0
    for piece in reversed(batch):
        end = piece.offset + piece.nbytes
        if not stops or start - end > NEAR_NBYTES:
            stop = end
        start = piece.offset
        stops.append(stop)
    stops.reverse()
    return stops
