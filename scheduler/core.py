"""The core loop of one worker as values: requests in, steps out, results in, replies out. Pure.

```text
submit ─> waiting ─(a running place and all pages)─> running ─> plan() ─RunStep─> worker ─StepDone─> apply() ─> replies
```
At most one step is out at a time. A request that ends while the step is out keeps its pages until the step is back:
the worker still writes into them.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from scheduler.chunking import cut_chunks, prefill_mode
from scheduler.paging import PageAllocator, pages_for
from scheduler.policy import StepKind, apportion, next_kind
from scheduler.protocol import Finished, ModeCounters, Tokens
from scheduler.request import Request
from worker.protocol import ExpertStats, Mode, RunStep, StepDone


class CoreLimits(Struct, frozen=True):
    """What one worker can take."""

    pages: int
    page_tokens: int
    max_running: int
    demand_tokens: int  # 0 for a dense model
    chunk_tokens: int


class Reply(Struct, frozen=True):
    """`message` goes to the client of `request`."""

    request: Request
    message: Tokens | Finished


class Core:
    """Requests of one worker: who waits, who runs, which pages they have, which step is out."""

    def __init__(self, limits: CoreLimits) -> None:
        self.pages = PageAllocator(limits.pages)
        self.counters: dict[Mode, ModeCounters] = {
            "decode": ModeCounters(),
            "demand": ModeCounters(),
            "streamed": ModeCounters(),
        }
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._out: list[tuple[Request, int]] = []  # requests of the step that is out, with their token counts
        self._out_mode: Mode = "decode"
        self._last: StepKind = "decode"
        self._ended: list[int] = []

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold pages and are not ended."""
        return len(self._running)

    @property
    def load(self) -> int:
        """Tokens still to be computed or, at most, to be generated, by which workers are compared."""
        requests = [*self._waiting, *self._running]
        return sum(r.pending + r.max_tokens - r.new_tokens for r in requests)

    def would_wait(self, request: Request) -> bool:
        """Whether `request`, submitted now, could not run at once."""
        return bool(self._waiting) or not self._fits(request)

    def submit(self, request: Request) -> None:
        """Queue it behind all others. It must fit into all pages together."""
        assert self._pages_of(request) <= self._limits.pages
        self._waiting.append(request)
        self._admit()

    def abort(self, request: Request) -> None:
        """End it wherever it is; nothing more is replied for it. No-op for one that has ended."""
        if request.phase == "waiting":
            self._waiting.remove(request)
            request.end()
        elif request.phase != "ended":
            self._end(request)
        self._admit()

    def plan(self, now_s: float) -> RunStep | None:
        """The next step, which is out from now on; None if there is nothing to do."""
        assert not self._out
        prefilling = [r for r in self._running if r.phase == "prefill"]
        decoding = [r for r in self._running if r.phase == "decode"]
        kind = next_kind(bool(prefilling), bool(decoding), self._last)
        if kind is None:
            return None
        self._last = kind
        if kind == "decode":
            self._out = [(request, 1) for request in decoding]
            self._out_mode = "decode"
        else:
            limits = self._limits
            counts = cut_chunks([r.pending for r in prefilling], limits.demand_tokens, limits.chunk_tokens)
            self._out = list(zip(prefilling, counts, strict=False))
            self._out_mode = prefill_mode(sum(counts), limits.demand_tokens)
        sequences = [request.part(count, self._limits.page_tokens, now_s) for request, count in self._out]
        return RunStep(mode=self._out_mode, sequences=sequences)

    def apply(self, done: StepDone, now_s: float) -> list[Reply]:
        """The step is back: what the clients of its requests are to get, in the step's order."""
        mode = self._out_mode
        self.counters[mode] = _plus(self.counters[mode], done.stats)
        replies: list[Reply] = []
        shares = split_stats(done.stats, [count for _, count in self._out])
        out, self._out = self._out, []
        for (request, count), share, token in zip(out, shares, done.tokens, strict=True):
            if request.phase == "ended":  # aborted while the step was out
                self.pages.release(request.end())
                continue
            request.took_part(count, mode, share)
            if request.pending:
                continue
            tokens, reason = request.take_token(token, now_s)
            replies.append(Reply(request, tokens))
            if reason:
                replies.append(Reply(request, request.finished(reason, now_s)))
                self._end(request)
        self._admit()
        return replies

    def fail_step(self) -> list[Request]:
        """The step failed: ends the requests that were in it and still ran, and returns them."""
        out, self._out = self._out, []
        failed = []
        for request, _ in out:
            if request.phase == "ended":
                self.pages.release(request.end())
            else:
                failed.append(request)
                self._end(request)
        self._admit()
        return failed

    def fail_all(self) -> list[Request]:
        """The worker is gone: ends every request, and returns those that had not ended."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for request in waiting:
            request.end()
        failed = self.fail_step()
        for request in list(self._running):
            failed.append(request)
            self._end(request)
        return failed + waiting

    def take_ended(self) -> list[int]:
        """Sequences that ended since the last call and that the worker may have seen."""
        ended, self._ended = self._ended, []
        return ended

    def _pages_of(self, request: Request) -> int:
        return pages_for(request.prompt_tokens + request.max_tokens, self._limits.page_tokens)

    def _fits(self, request: Request) -> bool:
        return len(self._running) < self._limits.max_running and self._pages_of(request) <= self.pages.free

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits for its pages, and everybody behind it too."""
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            pages = self.pages.allocate(self._pages_of(request))
            assert pages is not None
            request.admit(pages)
            self._running.append(request)

    def _end(self, request: Request) -> None:
        """A running request is over; its pages come back now, or with the step that is out."""
        self._running.remove(request)
        self._ended.append(request.sequence)
        if any(request is other for other, _ in self._out):
            request.phase = "ended"
        else:
            self.pages.release(request.end())


def split_stats(stats: ExpertStats, tokens: Sequence[int]) -> list[ExpertStats]:
    """A step's traffic split among its requests by their tokens in it; the shares add up to the whole.

    Who asked for an expert first is not known, and of no meaning: the step fetched it once for all of them.
    """
    hits = apportion(stats.hits, tokens)
    misses = apportion(stats.misses, tokens)
    copied = apportion(stats.copied_nbytes, misses if stats.misses else tokens)
    return [
        ExpertStats(steps=stats.steps, lookups=h + m, hits=h, misses=m, copied_nbytes=nbytes)
        for h, m, nbytes in zip(hits, misses, copied, strict=True)
    ]


def _plus(counters: ModeCounters, stats: ExpertStats) -> ModeCounters:
    sums = {name: getattr(counters, name) + getattr(stats, name) for name in ModeCounters.__struct_fields__}
    return msgspec.convert(sums, ModeCounters)


def total(counters: Sequence[ModeCounters]) -> ModeCounters:
    """Field-wise sum."""
    names = ModeCounters.__struct_fields__
    return ModeCounters(*(sum(getattr(c, name) for c in counters) for name in names))
