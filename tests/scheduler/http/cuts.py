"""Texts cut into pieces."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


def cut(text: str, places: Sequence[int]) -> list[str]:
    """`text` in pieces that end at `places`, which may lie beyond it."""
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def cuts(longest: int = 400) -> st.SearchStrategy[list[int]]:
    """Places, many or few."""
    return st.one_of(st.lists(st.integers(0, longest), max_size=60), st.just(list(range(longest))))


def texts_of(*parts: str) -> st.SearchStrategy[str]:
    """Texts of these parts, their beginnings and single characters, so that markers are whole, broken and nested."""
    beginnings: st.SearchStrategy[Any] = st.builds(
        lambda part, count: part[:count], st.sampled_from(parts), st.integers(1, 12)
    )
    piece = st.one_of(st.sampled_from(parts), beginnings, st.sampled_from(list('ab \n<>"{}\\é,')))
    return st.lists(piece, max_size=14).map("".join)
