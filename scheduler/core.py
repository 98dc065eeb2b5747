"""The core loop of one worker as values: requests in, steps out, results in, replies out. Pure.

```text
submit ─> waiting ─(a running place, pages)─> running ─> plan() ─RunStep─> worker ─StepDone─> apply() ─> replies
             ^────────────(preempted)────────────┘
```
At most one step is out at a time. A request that ends while the step is out keeps its pages until the step is back:
the worker still writes into them. Of a model with recurrent state a request has a state slot as long as it has pages,
and a snapshot counts from when its step is back without an error (`own_state.py`).

A request takes pages for what the next step computes. When none can be had, not even by evicting cached ones that no
request holds, the youngest running request is preempted: it gives its pages back and waits at its place in the order of
arrival. So there is always progress: the oldest request is never preempted, since with all others gone every page that
it does not use itself can be had, and it fits into all pages together. And there is no thrashing: a preempted request
comes back only when another one has ended or computed a chunk of its prompt, and only if all its tokens then fit beside
what the others are about to take.

It then prefills its prompt and takes its answer so far token by token: in one chunk it would be rounded otherwise.
"""

import itertools
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from scheduler.chunking import cut_chunks, is_short, prefill_mode
from scheduler.paging import KvPages, pages_for
from scheduler.policy import StepKind, Turn, after, next_kind
from scheduler.protocol import Failed, Finished, ModeCounters, Tokens
from scheduler.request import Request
from scheduler.traffic import plus, split_stats
from worker.protocol import NOT_FINITE, Mode, RunStep, SequenceStep, StepDone

BAD_LOGITS = Failed(
    "bad_logits",
    "what the model computes is not finite: NaN or infinity in the weights, or an overflow of the element type; "
    "try --dtype float32",
)


class CoreLimits(Struct, frozen=True):
    """What one worker can take."""

    pages: int
    page_tokens: int
    max_running: int
    demand_tokens: int  # 0 for a dense model
    chunk_tokens: int
    prefix_cache: bool = True
    state_slots: int = 0  # at least max_running; 0: the model has no recurrent state
    state_nbytes: int = 0  # of all of them
    cut_tokens: int | None = None  # of a model with recurrent state whose answers are to repeat: see paging.py


class Reply(Struct, frozen=True):
    """`message` goes to the client of `request`."""

    request: Request
    message: Tokens | Finished | Failed


class Core:
    """Requests of one worker: who waits, who runs, which pages they have, which step is out."""

    def __init__(self, limits: CoreLimits) -> None:
        self.pages = KvPages(
            limits.pages, limits.page_tokens, limits.prefix_cache, limits.state_slots, limits.cut_tokens
        )
        self.preempted = 0  # times that a request was
        self.cached_tokens = 0  # of prompts, never computed
        self.queried_tokens = 0  # of prompts that were looked for in the prefix cache
        self.counters: dict[Mode, ModeCounters] = {
            "decode": ModeCounters(),
            "demand": ModeCounters(),
            "streamed": ModeCounters(),
        }
        self.limits = limits
        self._waiting: deque[Request] = deque()  # in the order of arrival, and all behind the running ones
        self._running: list[Request] = []  # in the order of arrival
        self._held: dict[int, Request] = {}  # by sequence: will be submitted when their prompt is computed
        self._out: list[tuple[Request, int]] = []  # requests of the step that is out, with their token counts
        self._out_mode: Mode = "decode"
        self._out_since_s = 0.0
        self._turn = Turn()
        self._short_order = itertools.count()
        self._ended: list[int] = []

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet, held ones too."""
        return len(self._waiting) + len(self._held)

    @property
    def running(self) -> int:
        """Requests that hold pages and are not ended."""
        return len(self._running)

    @property
    def load(self) -> int:
        """Tokens still to be computed or, at most, to be generated, by which workers are compared."""
        requests = [*self._waiting, *self._running, *self._held.values()]
        return sum(r.pending + r.max_tokens - r.new_tokens for r in requests)

    @property
    def places(self) -> int:
        """Requests that may run at a time."""
        return self.limits.max_running

    def would_wait(self, request: Request, answers: int = 1) -> int:
        """How many of `answers` to the prompt of `request` could not run if they were submitted now, behind those held;
        at most, for one that waits may have become able to run since.

        What the first one computes the others share.
        """
        if self._waiting or not self._fits(request):
            return answers
        places = self.places - len(self._running) - len(self._held)
        if self.pages.states.total:
            places = min(places, self.pages.states.available - len(self._held))
        room = self._room() - self.pages.cost(request.tokens)
        fit = 1 + max(0, room) // self.pages.cost_of_another(request.tokens)
        return answers - max(0, min(answers, places, fit))

    def hold(self, requests: Iterable[Request]) -> None:
        """They count as waiting until they are submitted or dropped."""
        self._held |= {request.sequence: request for request in requests}

    def drop(self, request: Request) -> None:
        """It is held no more. No-op if it was not."""
        self._held.pop(request.sequence, None)

    def submit(self, request: Request) -> None:
        """Queue it behind all others. It must fit into all pages together."""
        self.drop(request)
        longest = request.prompt_tokens + request.max_tokens
        assert pages_for(longest, self.limits.page_tokens) <= self.limits.pages
        self.queried_tokens += request.prompt_tokens if self.limits.prefix_cache else 0
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
        kind: StepKind | None = None
        while self._running and not self._out:  # again if all that were chosen had to be preempted
            kind, chosen = self._choose()
            self._out = self._with_pages(chosen)
        if kind is None:
            return None
        self._turn, self._out_since_s = after(self._turn, kind), now_s
        self._out_mode = "decode"
        if kind != "decode":
            self._out_mode = prefill_mode(sum(count for _, count in self._out), self.limits.demand_tokens)
        return RunStep(mode=self._out_mode, sequences=[self._part(*part, now_s) for part in self._out])

    def apply(self, done: StepDone, now_s: float) -> list[Reply]:
        """The step is back: what the clients of its requests are to get, in the step's order."""
        mode, slots = self._out_mode, self.pages.states.available
        self.counters[mode] = plus(self.counters[mode], done.stats, now_s - self._out_since_s)
        replies: list[Reply] = []
        shares = split_stats(done.stats, [count for _, count in self._out])
        out, self._out = self._out, []
        logprobs = done.logprobs or [None] * len(out)
        for (request, count), share, token, told in zip(out, shares, done.tokens, logprobs, strict=True):
            bad = token == NOT_FINITE or (token < 0 and request.draws(count))
            if request.phase == "ended":  # aborted while the step was out
                self._close(request, bad)
                continue
            if bad:
                replies.append(Reply(request, BAD_LOGITS))
                self._end(request, bad)
                continue
            request.took_part(count, mode, share)
            if mode != "decode":
                self.pages.publish(request.kv, request.tokens, request.computed)
            self.pages.settle(request.kv, request.tokens)
            if not request.draws(0):
                continue
            tokens, reason = request.take_token(token, now_s, told)
            replies.append(Reply(request, tokens))
            end = request.unreadable or (request.finished(reason, now_s) if reason else request.astray)
            if end:
                replies.append(Reply(request, end))
                self._end(request)
        ended = any(request.phase == "ended" for request, _ in out)
        if ended or mode != "decode" or self.pages.states.available > slots:  # else there is no more room
            self._admit()
        return replies

    def fail_step(self) -> list[Request]:
        """The step failed: ends the requests that were in it and still ran, and returns them."""
        out, self._out = self._out, []
        failed = []
        for request, _ in out:
            if request.phase == "ended":
                self._close(request)
            else:
                failed.append(request)
                self._end(request)
        self._admit()
        return failed

    def fail_all(self) -> list[Request]:
        """The worker is gone, and all KV with it: ends every request, and returns those that had not ended."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._held.clear()
        for request in waiting:
            request.end()
        failed = self.fail_step()
        for request in list(self._running):
            failed.append(request)
            self._end(request)
        self.pages.clear()
        return failed + waiting

    def flush(self) -> bool:
        """Nothing stays cached. False, and nothing changes, while a request has not ended or a step is out."""
        if self._running or self._waiting or self._held or self._out:
            return False
        self.pages.clear()
        return True

    @property
    def any_ended(self) -> bool:
        """Whether `take_ended` would return any."""
        return bool(self._ended)

    def take_ended(self) -> list[int]:
        """Sequences that ended since the last call and that the worker may have seen."""
        ended, self._ended = self._ended, []
        return ended

    def _choose(self) -> tuple[StepKind, list[tuple[Request, int]]]:
        """What the next step is and how many tokens it takes of whom."""
        limits = self.limits
        short, long = self._prefilling()
        decoding = [request for request in self._running if request.phase == "decode"]
        kind = next_kind(self._turn, bool(decoding), bool(short), bool(long))
        assert kind
        if kind == "decode":
            return kind, [(request, 1) for request in decoding]
        chosen = short if kind == "short" else long
        pending = [request.pending for request in chosen]
        counts = cut_chunks(pending, limits.chunk_tokens, limits.cut_tokens or 1)
        return kind, list(zip(chosen, counts, strict=False))

    def _part(self, request: Request, count: int, now_s: float) -> SequenceStep:
        moves = self.pages.moves(request.kv, request.computed, request.computed + count, request.prompt_tokens)
        return request.part(count, self.limits.page_tokens, now_s, moves)

    def _prefilling(self) -> tuple[list[Request], list[Request]]:
        """Who is short, in the order of becoming so, and who is long, in the order of arrival.

        A request becomes short when it is admitted, or before its first chunk, when another one has computed what it
        begins with. One that has begun as a long one stays one to its end: it is the first of them anyway.
        """
        short, long = list[Request](), list[Request]()
        for request in self._running:
            if request.phase == "prefill":
                self._reuse(request)
        for request in [request for request in self._running if request.phase == "prefill"]:
            if request.short_since is None and not request.begun and self._is_short(request):
                request.short_since = next(self._short_order)
            (long if request.short_since is None else short).append(request)
        short.sort(key=lambda request: request.short_since or 0)
        return short, long

    def _is_short(self, request: Request) -> bool:
        return is_short(request.pending, self.limits.demand_tokens, self.limits.chunk_tokens)

    def _with_pages(self, chosen: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Gives each of `chosen` its pages, the youngest requests' if need be; those that were not preempted for it."""
        for request, count in chosen:
            while request.phase != "waiting" and not self.pages.grow(request.kv, request.computed + count):
                self._preempt()
        return [(request, count) for request, count in chosen if request.phase != "waiting"]

    def _preempt(self) -> None:
        """The youngest running request gives its pages back and waits again, before all that arrived after it."""
        request = self._running.pop()
        assert self._running, "the oldest request always fits"
        self._close(request)
        request.preempt()
        self._waiting.appendleft(request)
        self.preempted += 1

    def _fits(self, request: Request) -> bool:
        """Whether there is a place and pages for all its tokens, when each running request has what is left of its own
        prompt, and a page in any case."""
        if len(self._running) >= self.limits.max_running or not self.pages.room_for_state:
            return False
        return not self._running or self.pages.cost(request.tokens, request.prompt_tokens) <= self._room()

    def _room(self) -> int:
        """Pages beyond those that running requests are about to take."""
        owed = sum(max(1, self.pages.lacking(other.kv, len(other.tokens) + 1)) for other in self._running)
        return self.pages.available - owed

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits for its pages, and everybody behind it too."""
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            request.admit(self.pages.open(request.tokens, request.prompt_tokens))
            self._reuse(request)
            self._running.append(request)

    def _reuse(self, request: Request) -> None:
        self.cached_tokens += request.reuse(self.pages.reuse(request.kv, request.tokens))

    def _close(self, request: Request, bad: bool = False) -> None:
        """Its pages come back. `bad`: nobody is to reuse them, nor those of earlier steps, which seemed right."""
        if bad:
            self.pages.discard(request.kv)
        else:
            self.pages.close(request.kv, request.tokens, request.computed)

    def _end(self, request: Request, bad: bool = False) -> None:
        """A running request is over; its pages come back now, or with the step that is out."""
        self._running.remove(request)
        self._ended.append(request.sequence)
        request.end()
        if not any(request is other for other, _ in self._out):
            self._close(request, bad)
