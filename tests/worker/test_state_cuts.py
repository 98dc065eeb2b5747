"""Where prompts of recurrent models may be cut: against the pieces that their whole prompt is taken in by."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kernels.state_pieces import FIRST, ROWS, Span, cut
from worker.protocol import STATE_CUT_TOKENS


@given(st.integers(1, 400), st.sets(st.integers(1, 6)), st.sets(st.integers(1, 6)))
def test_cuts_and_snapshots_at_multiples_leave_the_pieces_as_they_are(
    tokens: int, cuts: set[int], kept: set[int]
) -> None:
    whole, _ = cut([Span(tokens, -1, [(tokens, 0)])])
    inner = [STATE_CUT_TOKENS * number for number in sorted(cuts) if STATE_CUT_TOKENS * number < tokens]
    pieces = list[tuple[int, int]]()
    for start, end in pairwise([0, *inner, tokens]):
        keep = [(STATE_CUT_TOKENS * n - start, n) for n in sorted(kept) if start < STATE_CUT_TOKENS * n < end]
        table, _ = cut([Span(end - start, 0 if start else -1, [*keep, (end - start, 0)])])
        pieces += [(start + int(row[FIRST]), int(row[ROWS])) for row in table]
    assert pieces == [(int(row[FIRST]), int(row[ROWS])) for row in whole]
