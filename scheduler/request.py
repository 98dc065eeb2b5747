"""One request, from its prompt to its end. Pure: times are given, nothing is sent.

```text
waiting ──admit──> prefill ──last chunk──> decode ──> ended
   ^ └────────────────┼──────────────────────┼──end──────^
   └─────preempt──────┴──────────────────────┘
```
"""

from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from scheduler.detokenize import Detokenizer, NoText
from scheduler.own_state import STATELESS, Moves
from scheduler.paging import Holding, pages_for
from scheduler.protocol import Failed, Finished, Logprobs, Reason, Timing, TokenLogprob, Tokens, Usage
from scheduler.step_sampling import seen_tokens
from scheduler.stopping import StopMatcher
from worker.protocol import Changes, ExpertStats, Mode, SequenceStep
from worker.protocol import Logprobs as StepLogprobs
from worker.protocol import Sampling as StepSampling

Phase = Literal["waiting", "prefill", "decode", "ended"]


class Ending(Struct, frozen=True):
    """Which tokens and strings end an answer, and how long it may get."""

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


class AnswerGrammar(Protocol):
    """What an answer must match, and where in it the answer is."""

    @property
    def is_over(self) -> bool:
        """Whether it matches and nothing can follow."""
        ...

    @property
    def fault(self) -> str:
        """Why there is no way on although it is not over; empty as long as there is one."""
        ...

    def allowed(self) -> bytes:
        """The tokens that may come next, as worker.protocol.Changes has them."""
        ...

    def take(self, token: int) -> None:
        """It is the answer's next one."""
        ...


class Request:
    """A prompt, the answer so far and what it has cost.

    `tokens` are prompt and answer; the KV of the first `computed` of them is in the pages of `kv`, so `computed` is
    where the next chunk starts.
    """

    kv: Holding
    """From `admit` on."""

    def __init__(
        self,
        sequence: int,
        prompt: list[int],
        sampling: StepSampling,
        ending: Ending,
        detokenizer: Detokenizer | NoText,
        arrived_s: float,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.sequence = sequence
        self.phase: Phase = "waiting"
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.computed = 0
        self.cached_tokens = 0  # of the prompt, never computed for this request
        self.begun = False  # a step has computed some of it since it was admitted
        self.short_since: int | None = None  # its place among those that are short; None if it is long
        self.max_tokens = ending.max_tokens
        self._sampling = sampling
        self._seen = seen_tokens(sampling.changes, prompt)
        self._ending = ending
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(ending.strings)
        self._grammar = grammar
        self._cost = _Cost()
        self._reached = 0  # the largest `computed` before it was preempted
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
        """Tokens whose KV is still to be computed: what is left of the prompt, and after it of the answer, which is the
        one newest token unless it was preempted."""
        return (self.prompt_tokens if self.computed < self.prompt_tokens else len(self.tokens)) - self.computed

    def draws(self, count: int) -> bool:
        """Whether a step that computes its next `count` tokens draws one: all of them are known, and no more."""
        return self.computed + count == len(self.tokens)

    def admit(self, kv: Holding) -> None:
        """Its KV goes into the pages of `kv`; it may prefill from now on."""
        assert self.phase == "waiting"
        self.kv = kv
        self.phase = "prefill"

    def reuse(self, covered: int) -> int:
        """The KV of its first `covered` tokens is there; how many tokens of the prompt that spares it.

        What it had computed before it was preempted is not spared.
        """
        spared = max(0, covered - max(self.computed, self._reached))
        self.cached_tokens += spared
        self.computed = max(self.computed, covered)
        self._settle()
        return spared

    def preempt(self) -> None:
        """Its pages are taken away: once it is admitted again it prefills its prompt and then takes its answer so far
        token by token, as before: computed at once, they would be rounded otherwise, and it might go on otherwise.

        Nothing is sent twice: what it draws next is its next token, by (seed, position) as if nothing had happened.
        """
        self._reached = max(self._reached, self.computed)
        self.computed = 0
        self.begun, self.short_since = False, None
        self.phase = "waiting"

    def part(self, count: int, page_tokens: int, now_s: float, moves: Moves = STATELESS) -> SequenceStep:
        """Its next `count` pending tokens as a part of a step; the step that takes the last of them samples."""
        if self._started_s is None:
            self._started_s = now_s
        end = self.computed + count
        return SequenceStep(
            sequence=self.sequence,
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            pages=self.kv.pages[: pages_for(end, page_tokens)],
            sample=self._sampling_now(count),
            state=moves.state,
            restore=moves.restore,
            snapshots=moves.snapshots,
        )

    def _sampling_now(self, count: int) -> StepSampling | None:
        """Of a token of the answer that is known something is drawn all the same, which leaves the step a graph."""
        if not self.draws(count):
            return StepSampling() if self.phase == "decode" else None
        changes = self._seen.told() if self._seen else self._sampling.changes
        if self._grammar:
            changes = replace(changes or Changes(), allowed=self._grammar.allowed())
        return replace(self._sampling, changes=changes)

    def took_part(self, count: int, mode: Mode, share: ExpertStats) -> None:
        """A step computed its next `count` tokens; `share` is its part of the step's expert traffic."""
        self.computed += count
        self.begun = True
        self._settle()
        self._cost.add(mode, share)

    def _settle(self) -> None:
        """A prompt that is computed, and of which a token was drawn before, is prefilled."""
        if self.prompt_tokens <= self.computed < len(self.tokens):
            self.phase = "decode"

    def take_token(
        self, token: int, now_s: float, logprobs: StepLogprobs | None = None
    ) -> tuple[Tokens, Reason | None]:
        """The step sampled `token`: what the client is to get now, and why the answer ends here, if it does."""
        self.phase = "decode"
        self.tokens.append(token)
        if self._seen:
            self._seen.add(token)
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s
        reason: Reason | None = None
        text = ""
        if token in self._ending.token_ids:
            reason = "stop"
        else:
            text = self._matcher.push(self._detokenizer.push(token))
            reason = self._full_at(token)
        if reason and not self._matcher.matched:
            text += self._matcher.push(self._detokenizer.flush())
            text += self._matcher.flush()
        if self._matcher.matched:
            reason = "stop"
        told = [self._told(token, logprobs)] if logprobs else None
        return Tokens(text=text, token_ids=[token], logprobs=told), reason

    def _full_at(self, token: int) -> Reason | None:
        """Why the answer goes on with no token after this one."""
        if self._grammar:
            self._grammar.take(token)
            if self._grammar.is_over:
                return "stop"
        return "length" if self.new_tokens >= self._ending.max_tokens else None

    @property
    def astray(self) -> Failed | None:
        """What it ends with if its grammar has no way on."""
        fault = self._grammar.fault if self._grammar else ""
        return Failed("grammar_failed", f"the grammar went wrong: {fault}") if fault else None

    @property
    def unreadable(self) -> Failed | None:
        """What it ends with if its tokens have no text."""
        fault = self._detokenizer.fault
        return Failed("text_failed", f"the tokenizer cannot decode the answer: {fault}") if fault else None

    def _told(self, token: int, logprobs: StepLogprobs) -> Logprobs:
        def entry(token_id: int, logprob: float) -> TokenLogprob:
            return TokenLogprob(token_id, logprob, self._detokenizer.alone(token_id))

        return Logprobs(entry(token, logprobs.drawn), [*map(entry, logprobs.ids, logprobs.top)])

    def end(self) -> None:
        """No further step will have it."""
        self.phase = "ended"

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
            cached_tokens=self.cached_tokens,
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
