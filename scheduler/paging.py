"""KV pages: who has which. Pure.

Every page is on the free list, in the prefix cache, or one request's own. A request's pages are a run of cached ones,
which it may share with others and holds in the cache, and behind them its own. Of a model with recurrent state it has a
state slot too, and takes cached pages only as far as there is a snapshot to go on from.

The bits of a recurrent state, and of all KV behind it, depend on where its sequence was cut, and on what of it was
decoded. Where answers are to repeat bit for bit whatever else is served, `cut_tokens` says at which multiples a prompt
may be cut without being computed otherwise. Then snapshots lie there alone, pages are cached up to there alone, and
neither is made of an answer: so a request reuses just what it would compute itself, also one that was preempted, whose
answer another one may have had in its prompt.
"""

from collections.abc import Sequence

from scheduler.own_state import STATELESS, Moves, OwnState, snapshot_positions
from scheduler.prefix_cache import Node, PrefixCache
from scheduler.state_slots import StateSlots


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)


class PageAllocator:
    """Hands out pages 0 .. total - 1, each to one owner at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owned = [False] * total

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing allocated) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page] = True
        return pages

    def release(self, pages: list[int]) -> None:
        """Take pages back. ValueError for one that is not out, before anything changes."""
        if len(set(pages)) != len(pages) or not all(0 <= page < self.total and self._owned[page] for page in pages):
            raise ValueError(f"pages {pages} are not all owned")
        for page in pages:
            self._owned[page] = False
        self._free.extend(reversed(pages))


class Holding:
    """The KV of one request: `pages` in the order of positions, of which the first `cached.depth` are in the cache.

    `state` is None if the model has no recurrent one, `prompt_tokens` is how many of its tokens are no answer.
    """

    __slots__ = ("cached", "pages", "prompt_tokens", "state")

    def __init__(self, root: Node, state: OwnState | None = None, prompt_tokens: int = 0) -> None:
        self.pages: list[int] = []
        self.cached = root
        self.prompt_tokens = prompt_tokens
        self.state = state


class KvPages:
    """All KV pages and state slots of one worker, and the prefix cache in them. Without `reuse` nothing is cached."""

    def __init__(
        self, total: int, page_tokens: int, reuse: bool, state_slots: int = 0, cut_tokens: int | None = None
    ) -> None:
        """`cut_tokens`, if given, is a whole number of pages."""
        self.states = StateSlots(state_slots)
        self._exact = cut_tokens is not None
        self._cut_tokens = cut_tokens or page_tokens
        assert self._cut_tokens % page_tokens == 0
        self._allocator = PageAllocator(total)
        self._cache = PrefixCache(page_tokens, self.states)
        self._page_tokens = page_tokens
        self._reuse = reuse

    @property
    def total(self) -> int:
        """All pages."""
        return self._allocator.total

    @property
    def free(self) -> int:
        """Pages with nothing in them."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Pages in the prefix cache, held by requests or not."""
        return self._cache.size

    @property
    def own(self) -> int:
        """Pages that are some request's own."""
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody holds."""
        return self.free + self._cache.evictable

    @property
    def room_for_state(self) -> bool:
        """Whether a request can be opened, for all that its state takes."""
        return not self.states.total or self.states.available > 0

    def open(self, tokens: Sequence[int] = (), prompt_tokens: int | None = None) -> Holding:
        """For a request for `tokens` that has nothing yet: with what is cached of them. There must be room for its
        state. The first `prompt_tokens` of them, or all, are no answer."""
        state = OwnState(self.states) if self.states.total else None
        kv = Holding(self._cache.root, state, len(tokens) if prompt_tokens is None else prompt_tokens)
        self.reuse(kv, tokens)
        if kv.state:
            kv.state.open()
        return kv

    def reusable(self, tokens: Sequence[int]) -> int:
        """Tokens at the beginning of `tokens` that are cached so that a request can go on behind them."""
        return self._cache.usable(self._cache.longest(tokens)).depth * self._page_tokens

    def cost(self, tokens: Sequence[int], prompt_tokens: int | None = None) -> int:
        """How many of the `available` pages a request that has none would take for `tokens` and one more token.

        Cached pages cost it nothing if another request holds them: those nobody holds count as available.
        `prompt_tokens` as for `open`.
        """
        sought = tokens if prompt_tokens is None else self._sought(tokens, prompt_tokens)
        shared = self._cache.held_depth(self._cache.usable(self._cache.longest(sought)))
        return pages_for(len(tokens) + 1, self._page_tokens) - shared

    def cost_of_another(self, tokens: Sequence[int]) -> int:
        """What a further request for the same `tokens` would take, once one has computed them and is still there."""
        reused = (len(tokens) - 1) // self._cut_tokens * self._cut_tokens
        shared = reused // self._page_tokens if self._reuse else 0
        return pages_for(len(tokens) + 1, self._page_tokens) - shared

    def lacking(self, kv: Holding, tokens: int) -> int:
        """Pages that it takes beyond those of `kv` to hold `tokens` positions."""
        return pages_for(tokens, self._page_tokens) - len(kv.pages)

    def reuse(self, kv: Holding, tokens: Sequence[int]) -> int:
        """Take what is cached of what follows in `tokens`, unless there are pages of its own already.

        Returns the positions that `kv` covers with cached pages.
        """
        if len(kv.pages) == kv.cached.depth:
            longest = self._cache.longest(self._sought(tokens, kv.prompt_tokens), above=kv.cached)
            node = self._cache.usable(longest, above=kv.cached)
            if kv.state:
                if node is not kv.cached:
                    assert node.snapshot
                    kv.state.start_from(node.snapshot)
                kv.state.branch = longest.depth * self._page_tokens // self._cut_tokens * self._cut_tokens
            kv.pages += self._cache.hold(node, above=kv.cached)
            kv.cached = node
        return kv.cached.depth * self._page_tokens

    def grow(self, kv: Holding, tokens: int) -> bool:
        """Room for `tokens` positions, evicting what it takes; False, and nothing changes, if there is not as much."""
        count = tokens - len(kv.pages) * self._page_tokens
        if count <= 0:
            return True
        count = pages_for(count, self._page_tokens)
        if count > self.available:
            return False
        if count > self.free:
            self._allocator.release(self._cache.evict(count - self.free))
        pages = self._allocator.allocate(count)
        assert pages is not None
        kv.pages += pages
        return True

    def moves(self, kv: Holding, start: int, end: int, prompt_tokens: int) -> Moves:
        """What the step that computes positions `start` .. `end` - 1 does with the state."""
        if kv.state is None:
            return STATELESS
        if not self._reuse or (self._exact and start >= prompt_tokens):
            return kv.state.moves([], None)
        branch = kv.state.branch
        return kv.state.moves(*snapshot_positions(start, end, prompt_tokens, branch, self._cut_tokens))

    def settle(self, kv: Holding, tokens: Sequence[int]) -> None:
        """The step is back without an error: its snapshots may be reused where the pages before them are cached."""
        if kv.state:
            kv.state.settle()
            kv.state.attach(self._cache, kv.cached, tokens)

    def publish(self, kv: Holding, tokens: Sequence[int], written: int) -> None:
        """The KV of the first `written` of `tokens` is there: full pages of its own go into the cache, still held.

        Not behind a page that the cache has from another request already: `kv` holds no pages but those it uses, so
        that one request alone never takes more than its length.
        """
        node, full = kv.cached, self._full_pages(kv, written)
        while self._reuse and node.depth < full and not self._cache.child(node, tokens):
            node = self._cache.add(node, tokens, kv.pages[node.depth])
        kv.cached = node

    def close(self, kv: Holding, tokens: Sequence[int], written: int) -> None:
        """The request is over, or starts again: its full pages that are written are cached, the others are free."""
        node, spare = kv.cached, kv.pages[kv.cached.depth :]
        if self._reuse:
            full = self._full_pages(kv, written)
            spare = kv.pages[max(full, node.depth) :]
            while node.depth < full:
                child = self._cache.child(node, tokens)
                if child is None:
                    node = self._cache.add(node, tokens, kv.pages[node.depth])
                else:
                    spare.append(kv.pages[node.depth])
                    self._cache.hold(child, above=node)
                    node = child
        if kv.state:
            kv.state.attach(self._cache, node, tokens)
            kv.state.close()
        self._cache.release(node)
        self._allocator.release(spare)
        kv.pages, kv.cached = [], self._cache.root

    def discard(self, kv: Holding) -> None:
        """The request is over, and its KV is not to be trusted: what it does not share with others is free.

        Nobody starts from its snapshots any more, nor from those on the way that it came."""
        if kv.state:
            kv.state.close(trusted=False)
            self._cache.distrust(kv.cached)
        self._allocator.release(kv.pages[kv.cached.depth :] + self._cache.discard(kv.cached))
        kv.pages, kv.cached = [], self._cache.root

    def clear(self) -> None:
        """What was in the pages is gone. No request may hold any."""
        self._allocator.release(self._cache.evict(self._cache.size))

    def _sought(self, tokens: Sequence[int], prompt_tokens: int) -> Sequence[int]:
        """What of `tokens` may be had from others."""
        return tokens[:prompt_tokens] if self._exact and prompt_tokens < len(tokens) else tokens

    def _full_pages(self, kv: Holding, written: int) -> int:
        """How many of the first pages of `kv`, of which `written` positions are written, others may have."""
        if self._exact:
            written = min(written, kv.prompt_tokens) // self._cut_tokens * self._cut_tokens
        return written // self._page_tokens
