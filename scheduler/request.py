"""One request, from its prompt to its end. Pure: times are given, nothing is sent.

```text
waiting ──admit──> prefill ──last chunk──> decode ──> ended
   └──────────────────┴──────────────────────┴──end──────^
```
"""

from typing import Literal

from msgspec import Struct

from scheduler.detokenize import Detokenizer, NoText
from scheduler.paging import pages_for
from scheduler.protocol import Finished, Timing, Tokens, Usage
from scheduler.stopping import StopMatcher
from worker.protocol import ExpertStats, Mode, SequenceStep
from worker.protocol import Sampling as StepSampling

Phase = Literal["waiting", "prefill", "decode", "ended"]
Reason = Literal["stop", "length", "abort"]


class Ending(Struct, frozen=True):
    """Which tokens and strings end an answer, and how long it may get."""

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


class Request:
    """A prompt, the answer so far and what it has cost.

    `tokens` are prompt and answer; the KV of the first `computed` of them is in `pages`, so `computed` is where the
    next chunk starts.
    """

    def __init__(
        self,
        sequence: int,
        prompt: list[int],
        sampling: StepSampling,
        ending: Ending,
        detokenizer: Detokenizer | NoText,
        arrived_s: float,
    ) -> None:
        self.sequence = sequence
        self.phase: Phase = "waiting"
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.max_tokens = ending.max_tokens
        self._sampling = sampling
        self._ending = ending
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(ending.strings)
        self._cost = _Cost()
        self._arrived_s = arrived_s
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._last_s = arrived_s

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed: what is left of the prompt, or the one newest token."""
        return len(self.tokens) - self.computed

    def admit(self, pages: list[int]) -> None:
        """Give it the pages for its whole length; it may prefill from now on."""
        assert self.phase == "waiting"
        self.pages = pages
        self.phase = "prefill"

    def part(self, count: int, page_tokens: int, now_s: float) -> SequenceStep:
        """Its next `count` pending tokens as a part of a step; the step that takes the last of them samples."""
        if self._started_s is None:
            self._started_s = now_s
        end = self.computed + count
        return SequenceStep(
            sequence=self.sequence,
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            pages=self.pages[: pages_for(end, page_tokens)],
            sample=self._sampling if end == len(self.tokens) else None,
        )

    def took_part(self, count: int, mode: Mode, share: ExpertStats) -> None:
        """A step computed its next `count` tokens; `share` is its part of the step's expert traffic."""
        self.computed += count
        self._cost.add(mode, share)

    def take_token(self, token: int, now_s: float) -> tuple[Tokens, Reason | None]:
        """The step sampled `token`: what the client is to get now, and why the answer ends here, if it does."""
        self.phase = "decode"
        self.tokens.append(token)
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s
        reason: Reason | None = None
        text = ""
        if token in self._ending.token_ids:
            reason = "stop"
        else:
            text = self._matcher.push(self._detokenizer.push(token))
            if self.new_tokens >= self._ending.max_tokens:
                reason = "length"
        if reason and not self._matcher.matched:
            text += self._matcher.push(self._detokenizer.flush())
            text += self._matcher.flush()
        if self._matcher.matched:
            reason = "stop"
        return Tokens(text=text, token_ids=[token]), reason

    def end(self) -> list[int]:
        """No step will have it again; gives its pages back."""
        pages, self.pages = self.pages, []
        self.phase = "ended"
        return pages

    def finished(self, reason: Reason, now_s: float) -> Finished:
        """The final reply."""
        gaps = self.new_tokens - 1
        first_s = self._first_s
        timing = Timing(
            queued_s=(self._started_s if self._started_s is not None else now_s) - self._arrived_s,
            ttft_s=first_s - self._arrived_s if first_s is not None else 0.0,
            tpot_s=(self._last_s - first_s) / gaps if first_s is not None and gaps > 0 else 0.0,
            total_s=now_s - self._arrived_s,
        )
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            cached_tokens=0,
            demand_chunks=self._cost.demand_chunks,
            streamed_chunks=self._cost.streamed_chunks,
            expert_hits=self._cost.hits,
            expert_misses=self._cost.misses,
            copied_nbytes=self._cost.copied_nbytes,
        )
        return Finished(reason=reason, usage=usage, timing=timing)


class _Cost:
    """Sums over the steps of one request."""

    def __init__(self) -> None:
        self.demand_chunks = 0
        self.streamed_chunks = 0
        self.hits = 0
        self.misses = 0
        self.copied_nbytes = 0

    def add(self, mode: Mode, share: ExpertStats) -> None:
        self.demand_chunks += mode == "demand"
        self.streamed_chunks += mode == "streamed"
        self.hits += share.hits
        self.misses += share.misses
        self.copied_nbytes += share.copied_nbytes
