"""The page allocator against a model that remembers who owns what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from scheduler.paging import PageAllocator, pages_for

TOTAL = 13


class Paging(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(TOTAL)
        self.owned: set[int] = set()

    @rule(target=held, count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> list[int]:
        pages = self.allocator.allocate(count)
        if pages is None:
            assert count > TOTAL - len(self.owned)
            return []
        assert len(set(pages)) == len(pages) == count
        assert not self.owned & set(pages)
        self.owned |= set(pages)
        return pages

    @rule(pages=consumes(held))
    def release(self, pages: list[int]) -> None:
        self.allocator.release(pages)
        self.owned -= set(pages)

    @rule(page=st.integers(-1, TOTAL))
    def release_what_is_not_out(self, page: int) -> None:
        if page not in self.owned:
            with pytest.raises(ValueError, match="not all owned"):
                self.allocator.release([page])

    @invariant()
    def no_page_is_lost(self) -> None:
        assert self.allocator.free == TOTAL - len(self.owned)


TestPaging = Paging.TestCase
TestPaging.settings = settings(max_examples=50, stateful_step_count=30)


def test_a_page_given_twice_is_refused_before_anything_changes() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    assert pages is not None
    with pytest.raises(ValueError, match="not all owned"):
        allocator.release([*pages, pages[0]])
    assert allocator.free == 1


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (127, 8), (128, 8), (129, 9)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages
