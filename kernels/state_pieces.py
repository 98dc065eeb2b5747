"""The rows of a prefill step as the kernels with a recurrent state take them: cut into pieces.

A span is one sequence's rows. Its pieces follow each other and start anew at every row where the state is to be kept,
so that what a sequence computes depends on its own cuts alone, never on what else is in the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

PIECE_ROWS = 64
"""Rows of a piece at most."""

FIRST, ROWS, TARGET, SPAN_FIRST, SOURCE = range(5)
"""Columns of `Pieces.table`: the piece's first row and how many it has, 0 if it only keeps the state once more; the
state slot that gets the state after it, or -1; its span's first row; the slot that the span goes on from, or -1 if from
zeros. All pieces of a span name the same source, and none but the last may have it as target."""


class Span(NamedTuple):
    """Rows of one sequence, and its states."""

    rows: int
    source: int  # the state slot it goes on from; -1: from zeros
    keep: Sequence[tuple[int, int]]  # (rows taken in, from 1 to `rows`; the slot that gets the state then)


class Pieces(NamedTuple):
    """P pieces of N spans, in order."""

    table: torch.Tensor  # [P, 5] int32
    spans: torch.Tensor  # [N + 1] int32: span n has the pieces spans[n] .. spans[n + 1] - 1


def cut(spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The arrays of Pieces for spans whose rows follow each other."""
    table: list[tuple[int, int, int, int, int]] = []
    bounds, span_first = [0], 0
    for span in spans:
        done = 0
        # Sorted by rows alone: of what is kept at the end, the order given decides what comes last.
        for end, slot in [*sorted(span.keep, key=lambda kept: kept[0]), *([] if span.keep else [(span.rows, -1)])]:
            while end - done > PIECE_ROWS:
                table.append((span_first + done, PIECE_ROWS, -1, span_first, span.source))
                done += PIECE_ROWS
            table.append((span_first + done, end - done, slot, span_first, span.source))
            done = end
        assert done == span.rows, "the state after the last row is kept nowhere"
        span_first += span.rows
        bounds.append(len(table))
    return np.array(table, np.int32).reshape(-1, 5), np.array(bounds, np.int32)
