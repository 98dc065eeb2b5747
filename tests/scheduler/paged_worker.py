"""A made-up worker whose answers depend on its KV pages, and an audit of who owns which.

KV at a position is a number made from the one before it and the token there, as a real model's depends on all tokens so
far; the next token is made from the last one. A page read that was not written for just these tokens so gives another
answer than `answer`, which needs no pages.
"""

from collections import Counter
from collections.abc import Iterable
from functools import reduce

from scheduler.core import Core
from scheduler.prefix_cache import Node
from scheduler.request import Request
from worker.protocol import NOT_FINITE, ExpertStats, RunStep, SequenceStep, StepDone

RECORD_NBYTES = 640
VOCAB = 1000
EMPTY = 17
GARBAGE = -1
NAN = -2
"""What a model computes once and for all that follows: no logits come of it."""


def kv_after(before: int, token: int) -> int:
    """KV of `token` behind a position whose KV is `before`."""
    return NAN if NAN in (before, token) else (before * 1_000_003 + token * 7919 + 12345) % 2**31


def behind(tokens: Iterable[int]) -> int:
    """KV of the last of `tokens`, which are all so far."""
    return reduce(kv_after, tokens, EMPTY)


def answer(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to `prompt`."""
    kv = behind(prompt)
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
        self.tells = True  # at once, as the real one; False: only where a token is to be drawn
        self._page_tokens = page_tokens
        self._misses = misses
        self._kv: dict[tuple[int, int], int] = {}
        self.states: dict[int, tuple[int, ...]] = {}  # by slot

    def run(self, step: RunStep) -> StepDone:
        """As the real one does."""
        tokens = []
        for sequence in step.sequences:
            kv = self.read(sequence.pages, sequence.start - 1) if sequence.start else EMPTY
            for position, token in enumerate(sequence.tokens, sequence.start):
                kv = NAN if sequence.sequence == self.bad else kv_after(kv, token)
                self._write(sequence.pages, position, kv)
            if sequence.state >= 0:
                kv = self._mixed(kv, behind(self._take_in(sequence)))
            self.computed += len(sequence.tokens)
            tokens.append(kv % VOCAB if sequence.sample and kv != NAN else NOT_FINITE if self._tells_of(kv) else -1)
        self.bad = None
        return StepDone(tokens, ExpertStats(1, self._misses + 2, 2, self._misses, self._misses * RECORD_NBYTES))

    def _tells_of(self, kv: int) -> bool:
        return self.tells and kv == NAN

    def _mixed(self, kv: int, state: int) -> int:
        """Of the last position; the KV alone if the state is right."""
        return NAN if NAN in (kv, state) else (kv + state) // 2

    def _take_in(self, sequence: SequenceStep) -> tuple[int, ...]:
        """The state behind the new tokens, of which snapshots are made on the way."""
        state: tuple[int, ...] = ()
        if sequence.start:
            state = self.states[sequence.state if sequence.restore < 0 else sequence.restore]
        new = [NAN if sequence.sequence == self.bad else token for token in sequence.tokens]
        for position, slot in sequence.snapshots:
            self.states[slot] = (*state, *new[: position - sequence.start])
        self.states[sequence.state] = (*state, *new)
        return self.states[sequence.state]

    def spoil(self, sequences: list[SequenceStep]) -> None:
        """What a failed step may leave: the KV of its new positions and the states that it writes are undefined."""
        for sequence in sequences:
            for slot in (sequence.state, *(slot for _, slot in sequence.snapshots)):
                self.states[slot] = (GARBAGE,)
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
    if pages.states.total:
        _check_states(core, open_, nodes, worker)


def _check_states(core: Core, open_: list[Request], nodes: list[Node], worker: PagedWorker) -> None:
    """Every state slot has one owner, every pin is counted, and each snapshot is the state behind its tokens."""
    slots = core.pages.states
    states = [state for request in open_ if (state := request.kv.state)]
    kept = {node.snapshot: path(node) for node in nodes if node.snapshot and node.snapshot.usable}
    for request in open_:
        assert request.kv.state
        kept |= {s: request.tokens[: s.position] for s in request.kv.state._loose if s.usable}
    for snapshot, tokens in kept.items():
        assert snapshot.position == len(tokens)
        taken_in = worker.states[snapshot.slot]
        assert taken_in == tuple(tokens) or (NAN in taken_in and not worker.tells)
    pins = Counter(state._source for state in states if state._source)
    all_ = {*kept, *pins}
    assert all(snapshot.pins == pins[snapshot] for snapshot in all_)
    assert slots.snapshots == len(all_)
    owners = [*slots._free, *(state.slot for state in states), *(snapshot.slot for snapshot in all_)]
    owners += [slot for state in states for _, slot in state._writing]
    assert sorted(owners) == list(range(slots.total)), "each state slot has exactly one owner"
    assert slots.available == slots.free + sum(not snapshot.pins for snapshot in all_)
    assert core._out or not any(state._writing for state in states), "what was written is kept or given back"


def path(node: Node) -> list[int]:
    """The tokens of the prefix that ends with it."""
    return [*(path(node.parent) if node.parent else ()), *node.tokens]


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
        assert cached == kv or (cached == NAN and not worker.tells), "cached KV is that of its tokens, if one can know"


def _check_order(core: Core) -> None:
    """Running requests are in the order of arrival, and all before those that wait, which are in it too."""
    requests: list[Request] = [*core._running, *core._waiting]
    assert [r.sequence for r in requests] == sorted(r.sequence for r in requests)
    assert all(r.phase in ("prefill", "decode") for r in core._running)
    assert all(r.phase == "waiting" for r in core._waiting)
