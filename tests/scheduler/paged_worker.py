"""A made-up worker whose answers depend on its KV pages, and an audit of who owns which.

KV at a position is a number made from the one before it and the token there, as a real model's depends on all tokens so
far; the next token is made from the last one. A page read that was not written for just these tokens so gives another
answer than `answer`, which needs no pages.
"""

from collections import Counter

from scheduler.core import Core
from scheduler.prefix_cache import Node
from scheduler.request import Request
from worker.protocol import ExpertStats, RunStep, SequenceStep, StepDone

RECORD_NBYTES = 640
VOCAB = 1000
EMPTY = 17
GARBAGE = -1
NAN = -2
"""What a model computes once and for all that follows: no logits come of it."""


def kv_after(before: int, token: int) -> int:
    """KV of `token` behind a position whose KV is `before`."""
    return NAN if before == NAN else (before * 1_000_003 + token * 7919 + 12345) % 2**31


def answer(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to `prompt`."""
    kv = EMPTY
    for token in prompt:
        kv = kv_after(kv, token)
    tokens = []
    for _ in range(count):
        tokens.append(kv % VOCAB)
        kv = kv_after(kv, tokens[-1])
    return tokens


class PagedWorker:
    """Runs steps at once. Every step reports `misses` experts missed and 2 hit."""

    def __init__(self, page_tokens: int, misses: int = 0) -> None:
        self.computed = 0  # tokens
        self.bad: int | None = None  # sequence whose next positions become NAN in the next step
        self._page_tokens = page_tokens
        self._misses = misses
        self._kv: dict[tuple[int, int], int] = {}

    def run(self, step: RunStep) -> StepDone:
        """As the real one does."""
        tokens = []
        for sequence in step.sequences:
            kv = self.read(sequence.pages, sequence.start - 1) if sequence.start else EMPTY
            for position, token in enumerate(sequence.tokens, sequence.start):
                kv = NAN if sequence.sequence == self.bad else kv_after(kv, token)
                self._write(sequence.pages, position, kv)
            self.computed += len(sequence.tokens)
            tokens.append(kv % VOCAB if sequence.sample and kv != NAN else -1)
        self.bad = None
        return StepDone(tokens, ExpertStats(1, self._misses + 2, 2, self._misses, self._misses * RECORD_NBYTES))

    def spoil(self, sequences: list[SequenceStep]) -> None:
        """What a failed step may leave: the KV of its new positions is undefined."""
        for sequence in sequences:
            for position in range(sequence.start, sequence.start + len(sequence.tokens)):
                self._write(sequence.pages, position, GARBAGE)

    def read(self, pages: list[int], position: int) -> int:
        """KV at a position of a sequence with these pages."""
        return self._kv[pages[position // self._page_tokens], position % self._page_tokens]

    def _write(self, pages: list[int], position: int, kv: int) -> None:
        self._kv[pages[position // self._page_tokens], position % self._page_tokens] = kv


def audit(core: Core, worker: PagedWorker) -> None:
    """Every page has one owner, every hold is counted, what is cached was computed, and nobody has overtaken.

    Looks into everything, by walking over all there is.
    """
    pages, cache = core.pages, core.pages._cache
    out = [request for request, _ in core._out]
    open_ = list({id(r): r for r in [*core._running, *(r for r in out if r.phase == "ended")]}.values())
    nodes = list(cache.nodes())
    owners = [*pages._allocator._free, *(node.page for node in nodes)]
    owners += [page for request in open_ for page in request.kv.pages[request.kv.cached.depth :]]
    assert sorted(owners) == list(range(pages.total)), "each page has exactly one owner"
    holders: Counter[int] = Counter()
    for request in open_:
        node, path = request.kv.cached, list[int]()
        while node.parent:
            holders[id(node)] += 1
            path.insert(0, node.page)
            node = node.parent
        assert request.kv.pages[: len(path)] == path, "a request uses all that it holds"
    assert all(node.holders == holders[id(node)] for node in nodes)
    assert pages.available == pages.free + sum(not node.holders for node in nodes)
    assert pages.cached == len(nodes) and pages.own == pages.total - pages.free - pages.cached
    for leaf in (node for node in nodes if not node.children):
        _check_path(leaf, worker)
    _check_order(core)


def _check_path(leaf: Node, worker: PagedWorker) -> None:
    path = list[Node]()
    node = leaf
    while node.parent:
        path.insert(0, node)
        node = node.parent
    kv = EMPTY
    for position, token in enumerate(token for node in path for token in node.tokens):
        kv = kv_after(kv, token)
        cached = worker.read([node.page for node in path], position)
        assert cached in (kv, NAN), "cached KV is that of its tokens, or what nobody could know to be none"


def _check_order(core: Core) -> None:
    """Running requests are in the order of arrival, and all before those that wait, which are in it too."""
    requests: list[Request] = [*core._running, *core._waiting]
    assert [r.sequence for r in requests] == sorted(r.sequence for r in requests)
    assert all(r.phase in ("prefill", "decode") for r in core._running)
    assert all(r.phase == "waiting" for r in core._waiting)
