"""What a step computes on, made from its RunStep: arrays on the host first, then tensors on the device by one copy."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import state_pieces
from kernels.sampling import RowSampling
from kernels.state_pieces import Pieces, cut
from worker.model.batch import Batch, PageTable, Span, StateRows
from worker.protocol import RunStep, Sampling, SequenceStep

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ALIGNMENT = 64
"""Bytes at which each array starts in a packed copy: torch has kernels of their own for tensors on smaller boundaries,
and which kernels a step takes must not depend on how many numbers come before."""


class StepArrays(NamedTuple):
    """T rows, sequence after sequence, and the R of them from which a token is drawn."""

    tokens: Ints  # [T]
    positions: Ints  # [T]
    kv_pages: Ints  # [T]
    kv_offsets: Ints  # [T]
    rows: Ints  # [R] ascending
    temperature: Floats  # [R]
    top_k: Ints  # [R]
    top_p: Floats  # [R]
    min_p: Floats  # [R]
    seed: Ints  # [R]
    position: Ints  # [R] of the token to draw
    lengths: NDArray[np.int32]  # [B] of a decode step by page table, else [0]
    table: NDArray[np.int32]  # [B, P], else [0, 0]
    sources: NDArray[np.int32]  # [B] of a decode step of a model with recurrent state, else [0]; see StateRows
    targets: NDArray[np.int32]  # [B] likewise
    pieces: NDArray[np.int32]  # [pieces, 5] of a prefill step of such a model, else [0, 5]; see Pieces
    piece_spans: NDArray[np.int32]  # [B + 1] likewise, else [0]


class StepInputs(NamedTuple):
    """The same on the device."""

    batch: Batch
    rows: torch.Tensor  # [R] int64
    sampling: RowSampling  # [R]


def step_arrays(step: RunStep, page_tokens: int, table_pages: int = 0, recurrent: bool = False) -> StepArrays:
    """The arrays of `step`, which has been checked, for a model with recurrent state if it is `recurrent`.

    With `table_pages` P the sequences, each of one new token, come with a page table of P pages each.
    """
    here = [np.arange(s.start, s.start + len(s.tokens)) for s in step.sequences]
    positions = np.concatenate(here)
    pages = [np.asarray(s.pages, np.int64)[p // page_tokens] for s, p in zip(step.sequences, here, strict=True)]
    drawn = [s for s in step.sequences if s.sample is not None]
    ends = np.cumsum([len(s.tokens) for s in step.sequences])
    settings = settings_of(step)
    return StepArrays(
        tokens=np.concatenate([np.asarray(s.tokens, np.int64) for s in step.sequences]),
        positions=positions,
        kv_pages=np.concatenate(pages),
        kv_offsets=positions % page_tokens,
        rows=np.array([end - 1 for end, s in zip(ends, step.sequences, strict=True) if s.sample is not None], np.int64),
        temperature=np.array([s.temperature for s in settings], np.float64),
        top_k=np.array([s.top_k for s in settings], np.int64),
        top_p=np.array([s.top_p for s in settings], np.float64),
        min_p=np.array([s.min_p for s in settings], np.float64),
        seed=np.array([_signed(s.seed) for s in settings], np.int64),
        position=np.array([s.start + len(s.tokens) for s in drawn], np.int64),
        **_page_table(step.sequences, table_pages),
        **_states(step, recurrent),
    )


def settings_of(step: RunStep) -> list[Sampling]:
    """[R] the settings of the sequences that draw a token."""
    return [s.sample for s in step.sequences if s.sample is not None]


def _page_table(sequences: Sequence[SequenceStep], pages: int) -> dict[str, Any]:
    if not pages:
        return {"lengths": np.empty(0, np.int32), "table": np.empty((0, 0), np.int32)}
    table = np.zeros((len(sequences), pages), np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    return {"lengths": np.array([s.start + 1 for s in sequences], np.int32), "table": table}


def _states(step: RunStep, recurrent: bool) -> dict[str, Any]:
    """Where recurrent states come from and go to."""
    nowhere = np.empty(0, np.int32)
    arrays = {"sources": nowhere, "targets": nowhere, "pieces": np.empty((0, 5), np.int32), "piece_spans": nowhere}
    if not recurrent:
        return arrays
    if step.mode == "decode":
        arrays["sources"] = np.array([_source(s) for s in step.sequences], np.int32)
        arrays["targets"] = np.array([s.state for s in step.sequences], np.int32)
        return arrays
    arrays["pieces"], arrays["piece_spans"] = cut([_state_span(s) for s in step.sequences])
    return arrays


def _source(sequence: SequenceStep) -> int:
    """The state slot that a sequence goes on from; -1: from zeros."""
    if sequence.start == 0:
        return -1
    return sequence.state if sequence.restore == -1 else sequence.restore


def _state_span(sequence: SequenceStep) -> state_pieces.Span:
    rows = len(sequence.tokens)
    keep = [(position - sequence.start, slot) for position, slot in sequence.snapshots]
    return state_pieces.Span(rows, _source(sequence), [*keep, (rows, sequence.state)])


def _signed(seed: int) -> int:
    """The low 64 bits of `seed` as a signed word."""
    return (seed + 2**63) % 2**64 - 2**63


def on_device(step: RunStep, arrays: StepArrays, device: torch.device) -> StepInputs:
    """The inputs of a step, with the pages of each sequence if there is no page table."""
    pages = [] if arrays.table.size else [np.asarray(s.pages, np.int64) for s in step.sequences]
    tensors = copies([*arrays, *pages], device)
    of_arrays, own = tensors[: len(arrays)], tensors[len(arrays) :]
    return assemble(of_arrays, tuple(_spans(step.sequences, own)) if own else ())


def assemble(tensors: Sequence[torch.Tensor], spans: tuple[Span, ...]) -> StepInputs:
    """The inputs whose arrays are `tensors`, in the order of StepArrays."""
    tokens, positions, kv_pages, kv_offsets, rows, *settings, lengths, table, sources, targets, pieces, bounds = tensors
    page_table = PageTable(table, lengths) if table.numel() else None
    states: StateRows | Pieces | None = Pieces(pieces, bounds) if pieces.numel() else None
    if sources.numel():
        states = StateRows(sources, targets)
    batch = Batch(tokens, positions, kv_pages, kv_offsets, spans, page_table, states)
    return StepInputs(batch, rows, RowSampling(*settings))


def _spans(sequences: Sequence[SequenceStep], pages: Sequence[torch.Tensor]) -> Iterator[Span]:
    first = 0
    for sequence, own in zip(sequences, pages, strict=True):
        yield Span(first, len(sequence.tokens), sequence.start, own)
        first += len(sequence.tokens)


def copies(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`; to another one than the host by one copy, which is not waited for."""
    if device.type == "cpu":
        return [torch.tensor(array) for array in arrays]
    host = torch.empty(packed_nbytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, host)
    return views(host.to(device, non_blocking=True), arrays)


def packed_nbytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes that `pack` fills."""
    return sum(_aligned(array.nbytes) for array in arrays)


def pack(arrays: Sequence[NDArray[Any]], host: torch.Tensor) -> None:
    """Write the arrays one after the other into `host` [packed_nbytes] uint8."""
    target, offset = host.numpy(), 0
    for array in arrays:
        target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += _aligned(array.nbytes)


def views(packed: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """The tensors that lie in `packed` [packed_nbytes] uint8 as `pack` has put arrays of these shapes there."""
    tensors, offset = [], 0
    for array in arrays:
        part = packed[offset : offset + array.nbytes]
        tensors.append(part.view(_TYPES[array.dtype]).view(array.shape))
        offset += _aligned(array.nbytes)
    return tensors


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64, np.dtype(np.int32): torch.int32}
