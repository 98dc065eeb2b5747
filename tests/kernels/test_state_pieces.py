"""The cut of spans into pieces, against what it must hold for any spans."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.state_pieces import FIRST, PIECE_ROWS, ROWS, SOURCE, SPAN_FIRST, TARGET, Span, cut


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    drawn = []
    for number in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 200))
        inside = draw(st.lists(st.integers(1, rows), max_size=4))
        keep = [(end, 10 * number + i) for i, end in enumerate(inside)]
        own = [(rows, 10 * number + 9)] if draw(st.booleans()) or (keep and max(inside) < rows) else []
        if keep and not own and max(inside) < rows:
            continue
        drawn.append(Span(rows, draw(st.integers(-1, 3)), keep + own))
    return drawn or [Span(1, -1, [])]


@given(spans())
def test_pieces_hold_every_row_once_and_keep_every_state_where_it_is_wanted(wanted: list[Span]) -> None:
    table, bounds = cut(wanted)
    assert bounds[0] == 0 and bounds[-1] == len(table) and len(bounds) == len(wanted) + 1
    row = 0
    for span, begin, end in zip(wanted, bounds[:-1], bounds[1:], strict=True):
        pieces, first = table[begin:end].tolist(), row
        kept = []
        for piece in pieces:
            assert piece[FIRST] == row and 0 <= piece[ROWS] <= PIECE_ROWS
            assert (piece[SPAN_FIRST], piece[SOURCE]) == (first, span.source)
            row += piece[ROWS]
            if piece[TARGET] >= 0:
                kept.append((row - first, piece[TARGET]))
        assert row - first == span.rows and sorted(kept) == sorted(span.keep)
        if span.keep and span.keep[-1][0] == span.rows:
            assert pieces[-1][TARGET] == span.keep[-1][1]  # what is named last is written last


def test_a_span_is_cut_like_that_alone_and_beside_others() -> None:
    span = Span(150, 2, [(70, 1), (150, 2)])
    alone, _ = cut([span])
    beside, bounds = cut([Span(33, -1, [(33, 0)]), span])
    columns = [ROWS, TARGET, SOURCE]
    assert (beside[bounds[1] :, columns] == alone[:, columns]).all()
    assert alone[:, ROWS].tolist() == [64, 6, 64, 16]
