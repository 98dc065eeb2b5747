"""Reads a checkpoint's weights, each byte once, in the order of the files, converting element types on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import ml_dtypes
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from copyengine.checkpoint.checks import DTYPES, Linear
from copyengine.checkpoint.dequantise import dequantised
from copyengine.checkpoint.direct import DirectFiles, is_better_direct
from copyengine.checkpoint.files import Files
from copyengine.checkpoint.finish import finish
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.rearrange import AS_IT_IS, Order
from copyengine.checkpoint.schemes import Kind, beside
from copyengine.checkpoint.tensors import dtype_of
from copyengine.wire.errors import ConfigError
from kernels.formats import RecordLayout

OnBytes = Callable[[int], None]
"""Called with the number of bytes just read; from several threads for the experts."""

NUMPY_DTYPE: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

FIELD_DTYPES = {**DTYPES, "U8": "uint8", "F8_E8M0": "uint8", "F8_E4M3": "float8_e4m3"}
"""safetensors' spelling -> ours, of the element types that the tensors of experts may have."""

NEAR_NBYTES = 64 << 10
"""Pieces of a file with no more than this between them are read in one go where it is read directly."""

READER_THREADS = 4
BATCH_NBYTES = 32 << 20
"""What one thread reads before it takes up the next piece of work."""


class _Piece(Struct, frozen=True):
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


def read_dense(model: Model, dtype: str, on_bytes: OnBytes) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Every tensor but the experts as (canonical name, array of `dtype` or what `dtype_of` says), in the order of the
    files; quantised linears are dequantised.

    ConfigError if a file is cut short, or holds a value that `dtype` cannot, or a scale that makes no number of a code.
    """
    first = model.dense | {name: linear.refs[0] for name, linear in model.linears.items()}
    with Files() as files:
        for name, ref in sorted(first.items(), key=lambda item: (item[1].path, item[1].offset)):
            if name in model.linears:
                yield name, _read_linear(files, model.linears[name], dtype, on_bytes)
                continue
            source = np.empty(ref.shape, NUMPY_DTYPE[DTYPES[ref.dtype]])
            files.read_into(ref.path, ref.offset, as_bytes(source))
            on_bytes(ref.nbytes)
            yield name, _convert(source, dtype_of(name, dtype), ref.path, name)


def read_experts(
    model: Model,
    layout: RecordLayout,
    banks: Sequence[NDArray[np.uint8]],
    on_bytes: OnBytes,
    direct: bool | None = None,
) -> int:
    """Fill `banks[l]` ([E, record_nbytes] uint8) with the experts as `layout` places them; returns the bytes read.

    Straight from the file where element type and order are the field's. `direct` is whether files are read past the
    page cache; if not given, where that is better. ConfigError as for `read_dense`, and for a scale or a global that
    makes no number of a code.
    """
    pieces = _pieces(model, layout)
    if direct is None:
        direct = is_better_direct(sum(piece.nbytes for piece in pieces))
    unused: SimpleQueue[Files | DirectFiles] = SimpleQueue()
    for _ in range(READER_THREADS):
        unused.put(DirectFiles() if direct else Files())
    work = [partial(_read_batch, batch, banks, on_bytes, unused) for batch in _batches(pieces)]
    return sum(run_all(work, READER_THREADS, "checkpoint-reader"))


def _read_linear(files: "Files", linear: Linear, dtype: str, on_bytes: OnBytes) -> NDArray[np.generic]:
    """The weight [N, K] as `dtype`, rounded to float32 once and then to that."""
    tensors: dict[Kind, NDArray[np.generic]] = {}
    for tensor, ref in zip(linear.scheme.tensors, linear.refs, strict=True):
        floating = DTYPES.get(ref.dtype)
        raw = np.empty(ref.shape, NUMPY_DTYPE[floating] if floating else np.uint8)
        files.read_into(ref.path, ref.offset, as_bytes(raw))
        on_bytes(ref.nbytes)
        tensors[tensor.kind] = read = raw.astype(np.float32) if floating else raw
        source = beside(linear.source, tensor.suffix)
        finish(tensor.kind, np.frombuffer(as_bytes(read), np.uint8), ref.path, source)
    weight = np.empty(linear.shape, NUMPY_DTYPE[dtype])
    low = 0
    for rows in dequantised(tensors, linear.scheme.block):
        weight[low : low + len(rows)] = _convert(rows, dtype, linear.refs[0].path, linear.source)
        low += len(rows)
    return weight


def _pieces(model: Model, layout: RecordLayout) -> list[_Piece]:
    """The work of read_experts in the order of the files."""
    pieces: list[_Piece] = []
    for entry, ref in model.experts:
        field = layout.field(entry.field)
        part_nbytes = field.nbytes // entry.parts
        start = field.offset + entry.part * part_nbytes
        stop = start + part_nbytes
        experts = range(entry.shape[0]) if entry.expert is None else (entry.expert,)
        nbytes = ref.nbytes // len(experts)
        for i, expert in enumerate(experts):
            offset = ref.offset + i * nbytes
            dtypes = (FIELD_DTYPES[ref.dtype], field.dtype)
            rows = field.shape[0] // entry.parts if field.shape else 1
            place = (entry.bank, expert, start, stop)
            what = (entry.source, entry.kind)
            pieces.append(_Piece(ref.path, offset, nbytes, *dtypes, *place, *what, order=entry.order, rows=rows))
    return sorted(pieces, key=lambda piece: (piece.path, piece.offset))


def _batches(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """`pieces` cut into runs of about BATCH_NBYTES of one file."""
    cuts = [0]
    nbytes = 0
    for i, (left, right) in enumerate(pairwise(pieces)):
        nbytes += left.nbytes
        if left.path != right.path or nbytes >= BATCH_NBYTES:
            cuts.append(i + 1)
            nbytes = 0
    for low, high in pairwise([*cuts, len(pieces)]):
        if low < high:
            yield pieces[low:high]


def _read_batch(
    batch: Sequence[_Piece],
    banks: Sequence[NDArray[np.uint8]],
    on_bytes: OnBytes,
    unused: "SimpleQueue[Files | DirectFiles]",
) -> int:
    total = 0
    with _taken(unused) as files:
        for piece, stop in zip(batch, _stops(batch), strict=True):
            record = banks[piece.bank][piece.expert, piece.start : piece.stop]
            if piece.dtype == piece.field_dtype and piece.order == AS_IT_IS:
                files.read_into(piece.path, piece.offset, record.data, stop)
            else:
                dtype = NUMPY_DTYPE.get(piece.dtype, np.dtype(np.uint8))
                source = np.empty(piece.nbytes // dtype.itemsize, dtype)
                files.read_into(piece.path, piece.offset, as_bytes(source), stop)
                if piece.dtype != piece.field_dtype:
                    source = _convert(source, piece.field_dtype, piece.path, piece.source)
                piece.order.fill(record, source, piece.rows)
            finish(piece.kind, record, piece.path, piece.source)
            on_bytes(piece.nbytes)
            total += piece.nbytes
    return total


def _stops(batch: Sequence[_Piece]) -> list[int]:
    """For each piece the end of the last of those behind it in the file that follow each other closely."""
    stops = [piece.end for piece in batch]
    for i in reversed(range(len(batch) - 1)):
        if batch[i + 1].offset - batch[i].end <= NEAR_NBYTES:
            stops[i] = stops[i + 1]
    return stops


@contextmanager
def _taken(unused: "SimpleQueue[Files | DirectFiles]") -> "Iterator[Files | DirectFiles]":
    """One of those, its file closed afterwards."""
    files = unused.get()
    try:
        with files:
            yield files
    finally:
        unused.put(files)


def as_bytes(array: NDArray[np.generic]) -> memoryview:
    """The bytes of a contiguous `array`."""
    return array.reshape(-1).view(np.uint8).data


def _convert(source: NDArray[np.generic], dtype: str, path: Path, name: str) -> NDArray[np.generic]:
    """`source` rounded to nearest even as `dtype`. Only float16 is narrower than what the files may hold."""
    target = NUMPY_DTYPE[dtype]
    if source.dtype == target:
        return source
    with np.errstate(over="ignore", invalid="ignore"):
        result = source.astype(target)
        overflows = dtype == "float16" and bool(np.any(np.isinf(result) & np.isfinite(source)))
    if overflows:
        raise ConfigError(f"{path}: tensor {name} holds values beyond float16's range; use --dtype bfloat16 or float32")
    return result
