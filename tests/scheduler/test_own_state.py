"""Where snapshots are made: against what they are for, for prompts cut in any way."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.own_state import snapshot_positions


@given(
    page_tokens=st.integers(1, 5),
    prompt_tokens=st.integers(1, 40),
    branch_pages=st.integers(0, 12),
    new_tokens=st.integers(0, 20),
    chunks=st.lists(st.integers(1, 9), min_size=40, max_size=40),
)
def test_every_cut_of_a_prompt_leaves_the_same_snapshots(
    page_tokens: int, prompt_tokens: int, branch_pages: int, new_tokens: int, chunks: list[int]
) -> None:
    """Before its last token and where it branches; the moving one comes by at the last page boundary of each step."""
    branch = min(branch_pages * page_tokens, (prompt_tokens - 1) // page_tokens * page_tokens)
    left, moving, start = list[int](), list[int](), 0
    while start < prompt_tokens + new_tokens:
        end = min(start + chunks.pop(), prompt_tokens) if start < prompt_tokens else start + 1
        here, moved = snapshot_positions(start, end, prompt_tokens, branch, page_tokens)
        positions = [*here, *([moved] if moved is not None else [])]
        assert all(start < position <= end and position % page_tokens == 0 for position in positions)
        assert len(set(positions)) == len(positions)
        boundary = end // page_tokens * page_tokens
        assert boundary <= start or boundary in positions, "whoever is stopped here computes less than a page again"
        left += here
        moving += [moved] if moved is not None else []
        start = end
    last = max(p for p in range(prompt_tokens) if p % page_tokens == 0)
    assert left == sorted({last, branch} - {0})
    assert {p for p in range(prompt_tokens + 1, start + 1) if p % page_tokens == 0} <= {*moving}
