"""Reads a checkpoint's weights, each byte once, in the order of the files, converting element types on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.checks import DTYPES, Linear
from copyengine.checkpoint.convert import BLOCK_NBYTES, NUMPY_DTYPE, convert, converted
from copyengine.checkpoint.dequantise import dequantised
from copyengine.checkpoint.direct import DirectFiles, is_better_direct
from copyengine.checkpoint.files import Files
from copyengine.checkpoint.finish import finish
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.pieces import GAP_NBYTES, Piece, batches, pieces_of, runs
from copyengine.checkpoint.rearrange import AS_IT_IS
from copyengine.checkpoint.schemes import Kind, beside
from copyengine.checkpoint.tensors import dtype_of
from kernels.formats import RecordLayout

OnBytes = Callable[[int], None]
"""Called with the number of bytes just read; from several threads for the experts."""

READER_THREADS = 4
"""Threads that read a checkpoint at a time: some wait for the disk while others convert."""

BATCH_NBYTES = 32 << 20
"""What one thread reads before it takes up the next piece of work."""


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
            yield name, converted(source, dtype_of(name, dtype), ref.path, name)


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
    pieces = pieces_of(model, layout)
    if direct is None:
        direct = is_better_direct(sum(piece.nbytes for piece in pieces))
    unused: SimpleQueue[Files | DirectFiles] = SimpleQueue()
    for _ in range(READER_THREADS):
        unused.put(DirectFiles() if direct else Files())
    work = [partial(_read_batch, batch, banks, on_bytes, unused) for batch in batches(pieces, BATCH_NBYTES)]
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
        weight[low : low + len(rows)] = converted(rows, dtype, linear.refs[0].path, linear.source)
        low += len(rows)
    return weight


def _read_batch(
    batch: Sequence[Piece],
    banks: Sequence[NDArray[np.uint8]],
    on_bytes: OnBytes,
    unused: "SimpleQueue[Files | DirectFiles]",
) -> int:
    total = 0
    with _taken(unused) as files:
        for run, stop in runs(batch):
            records = [banks[piece.bank][piece.expert, piece.start : piece.stop] for piece in run]
            first = run[0]
            if first.is_straight:
                files.read_all(first.path, first.offset, _places(run, records), stop)
            elif first.order == AS_IT_IS:
                _read_converted(files, first, records[0], stop)
            else:
                _read_rearranged(files, first, records[0], stop)
            for piece, record in zip(run, records, strict=True):
                finish(piece.kind, record, piece.path, piece.source)
            nbytes = sum(piece.nbytes for piece in run)
            on_bytes(nbytes)
            total += nbytes
    return total


def _places(run: Sequence[Piece], records: Sequence[NDArray[np.uint8]]) -> list[memoryview]:
    """Where the bytes of the file go, what nobody wants of them included."""
    unwanted: NDArray[np.uint8] = np.empty(GAP_NBYTES, np.uint8)
    places: list[memoryview] = []
    at = run[0].offset
    for piece, record in zip(run, records, strict=True):
        if piece.offset > at:
            places.append(unwanted[: piece.offset - at].data)
        places.append(record.data)
        at = piece.end
    return places


def _read_converted(files: "Files | DirectFiles", piece: Piece, record: NDArray[np.uint8], stop: int) -> None:
    """Block by block, so that what is read is in the processor's cache when it is converted."""
    field = record.view(NUMPY_DTYPE[piece.field_dtype])
    block = np.empty(BLOCK_NBYTES // NUMPY_DTYPE[piece.dtype].itemsize, NUMPY_DTYPE[piece.dtype])
    for low in range(0, field.size, block.size):
        part = block[: field.size - low]
        files.read_into(piece.path, piece.offset + low * part.itemsize, as_bytes(part), stop)
        convert(part, field[low : low + part.size], piece.path, piece.source)


def _read_rearranged(files: "Files | DirectFiles", piece: Piece, record: NDArray[np.uint8], stop: int) -> None:
    dtype = NUMPY_DTYPE.get(piece.dtype, np.dtype(np.uint8))
    source = np.empty(piece.nbytes // dtype.itemsize, dtype)
    files.read_into(piece.path, piece.offset, as_bytes(source), stop)
    if piece.dtype != piece.field_dtype:
        source = converted(source, piece.field_dtype, piece.path, piece.source)
    piece.order.fill(record, source, piece.rows)


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
