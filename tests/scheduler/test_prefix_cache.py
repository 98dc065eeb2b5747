"""The prefix cache against a model that remembers every prefix by its tokens, with times of use.

Holders come and go, add pages behind what they hold, and pages are evicted, in any order.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from scheduler.prefix_cache import Node, PrefixCache

PAGE_TOKENS = 2
TOKENS = st.lists(st.integers(0, 1), max_size=11)
Prefix = tuple[int, ...]


class Entry:
    """What the model knows of one cached page."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.holders = 0
        self.let_go = -1  # when the last holder did


class Caching(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PAGE_TOKENS)
        self.entries: dict[Prefix, Entry] = {}
        self.pages = 0
        self.time = 0

    def prefixes(self, tokens: list[int], last: int) -> list[Prefix]:
        """Of full pages, up to `last` tokens, shortest first."""
        return [tuple(tokens[:end]) for end in range(PAGE_TOKENS, last + 1, PAGE_TOKENS)]

    def cached(self, tokens: list[int], last: int) -> list[Prefix]:
        """Those that are cached, as long as none is missing."""
        found = []
        for prefix in self.prefixes(tokens, last):
            if prefix not in self.entries:
                break
            found.append(prefix)
        return found

    @rule(target=held, tokens=TOKENS)
    def hold_the_longest(self, tokens: list[int]) -> tuple[Node, list[int]]:
        node = self.cache.longest(tokens)
        found = self.cached(tokens, len(tokens) - 1)
        assert node.depth == len(found)
        assert self.cache.held_depth(node) == sum(self.entries[prefix].holders > 0 for prefix in found)
        assert self.cache.hold(node, above=self.cache.root) == [self.entries[prefix].page for prefix in found]
        for prefix in found:
            self.entries[prefix].holders += 1
        return node, tokens[: node.depth * PAGE_TOKENS]

    @rule(target=held, holding=consumes(held), more=TOKENS)
    def add_and_hold_what_follows(self, holding: tuple[Node, list[int]], more: list[int]) -> tuple[Node, list[int]]:
        node, tokens = holding
        tokens = tokens + more
        for prefix in self.prefixes(tokens, len(tokens))[node.depth :]:
            child = self.cache.child(node, tokens)
            assert (child is not None) == (prefix in self.entries)
            if child is None:
                self.entries[prefix] = Entry(self.pages)
                node = self.cache.add(node, tokens, self.pages)
                self.pages += 1
            else:
                assert self.cache.hold(child, above=node) == [self.entries[prefix].page]
                node = child
            self.entries[prefix].holders += 1
        assert self.cache.longest([*tokens, 0], above=holding[0]).depth >= node.depth
        return node, tokens[: node.depth * PAGE_TOKENS]

    @rule(target=held, holding=consumes(held))
    def let_go(self, holding: tuple[Node, list[int]]) -> object:
        self.cache.release(holding[0])
        self.time += 1
        for prefix in self.prefixes(holding[1], len(holding[1])):
            entry = self.entries[prefix]
            entry.holders -= 1
            entry.let_go = self.time
        return multiple()

    @rule(holding=consumes(held))
    def discard(self, holding: tuple[Node, list[int]]) -> None:
        pages = []
        prefixes = self.prefixes(holding[1], len(holding[1]))
        while prefixes and self.entries[prefixes[-1]].holders == 1:
            prefix = prefixes[-1]
            if any(longer[: len(prefix)] == prefix for longer in self.entries if len(longer) > len(prefix)):
                break
            pages.append(self.entries.pop(prefixes.pop()).page)
        assert self.cache.discard(holding[0]) == pages
        self.time += 1
        for prefix in prefixes:
            self.entries[prefix].holders -= 1
            self.entries[prefix].let_go = self.time

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        count = min(count, self.cache.evictable)
        expected = []
        for _ in range(count):
            leaves = [p for p in self.entries if not any(q[: len(p)] == p for q in self.entries if len(q) > len(p))]
            victim = min((p for p in leaves if not self.entries[p].holders), key=lambda p: self.entries[p].let_go)
            expected.append(self.entries.pop(victim).page)
        assert self.cache.evict(count) == expected

    @invariant()
    def all_that_nobody_holds_can_be_evicted(self) -> None:
        assert self.cache.size == len(self.entries)
        assert self.cache.evictable == sum(not entry.holders for entry in self.entries.values())
        assert {node.page for node in self.cache.nodes()} == {entry.page for entry in self.entries.values()}


TestCaching = Caching.TestCase
TestCaching.settings = settings(max_examples=100, stateful_step_count=30)


def cache_of(*prompts: list[int]) -> PrefixCache:
    """With all full pages of these prompts; nobody holds any."""
    cache = PrefixCache(4)
    for prompt in prompts:
        node = cache.root
        while (node.depth + 1) * 4 <= len(prompt):
            child = cache.child(node, prompt)
            if child:
                cache.hold(child, above=node)
            node = child or cache.add(node, prompt, cache.size)
        cache.release(node)
    return cache


def test_only_whole_equal_pages_match() -> None:
    cache = cache_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    for prompt, pages in (
        ([], 0),
        ([1, 2, 3, 4], 0),  # a token is left to compute
        ([1, 2, 3, 4, 0], 1),
        ([1, 2, 3, 0, 5], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 1),
        ([1, 2, 3, 4, 5, 6, 0, 8, 9], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 2),
        ([5, 6, 7, 8, 9], 0),  # the same tokens, but not behind the same ones
    ):
        assert cache.longest(prompt).depth == pages, prompt


def test_prompts_that_part_share_the_pages_before() -> None:
    cache = cache_of([1] * 8 + [2] * 4, [1] * 8 + [3] * 4, [1] * 4)
    assert cache.size == 4


def test_the_prefix_least_recently_held_goes_first_and_its_end_before_its_beginning() -> None:
    cache = cache_of([1] * 4 + [2] * 4, [3] * 4, [1] * 4 + [4] * 4)
    by_page = {node.page: node.tokens[0] for node in cache.nodes()}
    assert [by_page[page] for page in cache.evict(4)] == [2, 3, 4, 1]
