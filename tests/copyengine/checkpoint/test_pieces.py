"""Runs of pieces: against what one call may read, for pieces of any size and distance."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from copyengine.checkpoint.pieces import GAP_NBYTES, RUN_NBYTES, RUN_PIECES, Piece, batches, runs
from copyengine.checkpoint.rearrange import AS_IT_IS, Order


def piece(path: str, offset: int, nbytes: int, dtype: str = "bfloat16", order: Order = AS_IT_IS) -> Piece:
    return Piece(Path(path), offset, nbytes, dtype, "bfloat16", 0, 0, 0, nbytes, "t", "weight", order, 1)


KINDS = st.sampled_from([("bfloat16", AS_IT_IS), ("float32", AS_IT_IS), ("bfloat16", Order(transposed=True))])
GAPS = st.sampled_from([0, 0, 4, GAP_NBYTES, GAP_NBYTES + 1, 1 << 20])
SIZES = st.sampled_from([4, 4, 1000, RUN_NBYTES // 2, RUN_NBYTES, 3 * RUN_NBYTES])


@given(st.lists(st.tuples(st.sampled_from("ab"), GAPS, SIZES, KINDS, st.integers(1, 300))))
def test_runs_hold_every_piece_once_and_only_what_one_call_reads(
    found: list[tuple[str, int, int, tuple[str, Order], int]],
) -> None:
    """In the files' order; no run could have taken in the next piece; each is told how far reads go on behind it."""
    made: list[Piece] = []
    end = 0
    for path, gap, nbytes, (dtype, order), times in sorted(found, key=lambda item: item[0]):
        for _ in range(times if nbytes <= 1000 else 1):
            end += gap
            made.append(piece(path, end, nbytes, dtype, order))
            end += nbytes
    cut = [run for batch in batches(made, 8 * RUN_NBYTES) for run in runs(batch)]
    assert [each for run, _ in cut for each in run] == made
    for run, stop in cut:
        assert run[-1].end <= stop
        if len(run) > 1:
            assert all(each.is_straight and each.path == run[0].path for each in run)
            assert all(0 <= b.offset - a.end <= GAP_NBYTES for a, b in pairwise(run))
            assert sum(each.nbytes for each in run[:-1]) < RUN_NBYTES and len(run) <= RUN_PIECES
    for batch in batches(made, 8 * RUN_NBYTES):
        inner = [run for run, _ in runs(batch)]
        for left, right in pairwise(inner):
            full = sum(each.nbytes for each in left) >= RUN_NBYTES or len(left) == RUN_PIECES
            near = 0 <= right[0].offset - left[-1].end <= GAP_NBYTES
            assert full or not (near and left[-1].is_straight and right[0].is_straight)
