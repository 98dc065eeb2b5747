"""Several answers to one Generate: each a request of its own, with one client and one final reply."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from scheduler.lane import Lane, Outbox
from scheduler.protocol import Choice, Failed, Finished, Reason, Timing, Tokens, Usage
from scheduler.request import Request


class Choices:
    """The requests of one Generate on one lane. The first computes the prompt; the others wait until it is cached."""

    def __init__(self, lane: Lane, requests: Sequence[Request], outbox: Outbox) -> None:
        """`outbox` gets the tokens of all, and the final reply when all have ended or one failed."""
        self._lane = lane
        self.requests = requests
        self._outbox = outbox
        self._held = range(1, len(requests))
        self._ends: dict[int, Finished] = {}

    def start(self) -> None:
        """Submit the first."""
        self._lane.core.hold(self.requests[1:])
        self._lane.submit(self.requests[0], _ChoiceOutbox(self, 0))

    def abort(self) -> None:
        """End those that have not ended."""
        held, self._held = self._held, range(0)
        for index, request in enumerate(self.requests):
            self._lane.core.drop(request)
            if self._lane.abort(request) or index in held:
                self.take(index, request.finished("abort", time.monotonic()))

    def so_far(self, now_s: float) -> Finished:
        """The figures of all, of those that have not ended as if they were aborted now."""
        ends = enumerate(self.requests)
        return combined([self._ends.get(i) or request.finished("abort", now_s) for i, request in ends])

    def take(self, index: int, message: Tokens | Finished | Failed) -> None:
        """A reply to request `index`. After a Failed whoever waits for the final reply aborts the others."""
        match message:
            case Tokens():
                self._outbox.put_nowait(replace(message, index=index))
                self._submit_held()
            case Finished():
                self._ends[index] = message
                if len(self._ends) == len(self.requests):
                    self._outbox.put_nowait(combined([self._ends[i] for i in range(len(self.requests))]))
            case Failed():
                self._outbox.put_nowait(message)

    def _submit_held(self) -> None:
        held, self._held = self._held, range(0)
        for index in held:
            self._lane.submit(self.requests[index], _ChoiceOutbox(self, index))


class _ChoiceOutbox:
    """See scheduler.lane.Outbox."""

    def __init__(self, choices: Choices, index: int) -> None:
        self._choices = choices
        self._index = index

    def put_nowait(self, message: Tokens | Finished | Failed) -> None:
        self._choices.take(self._index, message)


def combined(ends: Sequence[Finished]) -> Finished:
    """The final reply to all, as Finished says."""
    reasons = [end.reason for end in ends]
    reason: Reason = "abort" if "abort" in reasons else "length" if "length" in reasons else "stop"
    choices = [Choice(end.reason, end.usage, end.timing) for end in ends]
    return Finished(reason, _usage(ends), _timing([end.timing for end in ends]), choices)


def _usage(ends: Sequence[Finished]) -> Usage:
    sums = {name: sum(getattr(end.usage, name) for end in ends) for name in Usage.__struct_fields__}
    first = ends[0].usage
    return Usage(**sums | {"prompt_tokens": first.prompt_tokens, "cached_tokens": first.cached_tokens})


def _timing(timings: Sequence[Timing]) -> Timing:
    gaps = [timing.tpot_s for timing in timings if timing.tpot_s]
    return Timing(
        queued_s=min(timing.queued_s for timing in timings),
        ttft_s=min((timing.ttft_s for timing in timings if timing.ttft_s), default=0.0),
        tpot_s=sum(gaps) / len(gaps) if gaps else 0.0,
        total_s=max(timing.total_s for timing in timings),
    )
