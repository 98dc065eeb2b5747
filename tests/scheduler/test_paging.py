"""The page allocator against a model that remembers who owns what; pages of requests, with a prefix cache, by cases.

In random histories the latter are audited in test_core.py.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from scheduler.paging import Holding, KvPages, PageAllocator, pages_for

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


def filled(pages: KvPages, tokens: list[int]) -> Holding:
    """A request that has computed all of `tokens`."""
    kv = pages.open()
    pages.reuse(kv, tokens)
    assert pages.grow(kv, len(tokens))
    pages.publish(kv, tokens, len(tokens))
    return kv


def figures(pages: KvPages) -> tuple[int, int, int, int]:
    """Free, cached, requests' own, and what can be had."""
    return pages.free, pages.cached, pages.own, pages.available


def test_full_pages_are_cached_and_held_and_the_last_is_the_requests_own() -> None:
    pages = KvPages(6, 4, reuse=True)
    kv = filled(pages, [1] * 10)
    assert figures(pages) == (3, 2, 1, 3)
    assert not pages.grow(kv, 25), "more than all pages"
    assert figures(pages) == (3, 2, 1, 3), "nothing has changed"
    pages.close(kv, [1] * 10, 10)
    assert figures(pages) == (4, 2, 0, 6)
    assert pages.reusable([1] * 9) == 8


def test_what_was_not_written_is_not_cached() -> None:
    pages = KvPages(6, 4, reuse=True)
    kv = pages.open()
    assert pages.grow(kv, 12)
    pages.close(kv, [1] * 12, written=7)
    assert figures(pages) == (5, 1, 0, 6)


def test_a_copy_of_a_cached_page_stays_its_requests_own_and_goes_with_it() -> None:
    """Two compute the same at once. Behind its copy the second one caches nothing before its end."""
    pages = KvPages(8, 4, reuse=True)
    tokens = [1] * 4 + [2] * 4
    first, second = pages.open(), pages.open()
    for kv in (first, second):
        assert pages.grow(kv, 8)
    pages.publish(first, tokens, 4)
    pages.publish(second, tokens, 8)
    assert figures(pages) == (4, 1, 3, 4)
    copy, last = second.pages
    pages.close(second, tokens, 8)
    assert figures(pages) == (5, 2, 1, 6)
    again = pages.open()
    assert pages.reuse(again, [*tokens, 3]) == 8
    assert again.pages == [first.pages[0], last] and copy not in again.pages


def test_cached_pages_are_not_put_behind_pages_of_ones_own() -> None:
    """Whoever has begun a page computes it to its end, also if another request has completed it in the meantime."""
    pages = KvPages(8, 4, reuse=True)
    tokens = [1] * 9
    kv = pages.open()
    assert pages.grow(kv, 2)
    begun = list(kv.pages)
    filled(pages, tokens)
    assert pages.reuse(kv, tokens) == 0 and kv.pages == begun


def test_eviction_makes_room_and_spares_what_is_held() -> None:
    pages = KvPages(6, 4, reuse=True)
    pages.close(filled(pages, [1] * 8), [1] * 8, 8)
    held = filled(pages, [2] * 8)
    other = pages.open()
    assert pages.grow(other, 12), "two free pages and one of the first request's"
    assert pages.reusable([1] * 9) == 4 and pages.reusable([2] * 9) == 8
    assert not pages.grow(other, 20) and pages.grow(other, 16)
    assert held.pages and pages.reusable([1] * 9) == 0


def test_what_a_new_request_costs() -> None:
    pages = KvPages(8, 4, reuse=True)
    tokens = [1] * 8
    assert pages.cost(tokens) == 3, "with a page for the next token"
    kv = filled(pages, tokens)
    assert pages.cost([*tokens, 2]) == 1, "another request holds the others anyway"
    pages.close(kv, tokens, 8)
    assert pages.cost([*tokens, 2]) == 3, "cached pages that nobody holds count as available"


def test_without_reuse_nothing_is_cached() -> None:
    pages = KvPages(6, 4, reuse=False)
    pages.close(filled(pages, [1] * 8), [1] * 8, 8)
    assert figures(pages) == (6, 0, 0, 6)


def test_what_is_cached_goes_with_the_worker() -> None:
    pages = KvPages(6, 4, reuse=True)
    pages.close(filled(pages, [1] * 8), [1] * 8, 8)
    pages.clear()
    assert figures(pages) == (6, 0, 0, 6)
    assert pages.reusable([1] * 9) == 0
