"""A made-up worker that rounds: what it computes depends on how a sequence was cut, and on what of it was decoded.

It is as a model with recurrent state at its worst. A prefill step takes a sequence in by pieces of `piece` tokens, that
start anew where the step starts and where a state is kept, and all that a piece computes depends on its length. A
decoded token is computed otherwise than a prefilled one. What is drawn depends on the state and on the KV of all
positions.
"""

from functools import reduce

from worker.protocol import ExpertStats, RunStep, SequenceStep, StepDone

VOCAB = 97
GARBAGE = -1


def mixed(*values: int) -> int:
    """Depends on all of them and their order."""
    return reduce(lambda before, value: (before * 1_000_003 + value * 7919 + 12345) % 2**31, values, len(values))


class CutWorker:
    """Runs steps at once."""

    def __init__(self, page_tokens: int, piece: int) -> None:
        self.computed = 0  # tokens
        self.bad: int | None = None  # taken and not minded
        self._page_tokens = page_tokens
        self._piece = piece
        self._kv: dict[tuple[int, int], int] = {}
        self._states: dict[int, int] = {}  # by slot

    def run(self, step: RunStep) -> StepDone:
        """As the real one does, beside that."""
        tokens = []
        for sequence in step.sequences:
            state = self._take_in(sequence, decoded=step.mode == "decode")
            end = sequence.start + len(sequence.tokens)
            read = [self._kv[self._place(sequence.pages, position)] for position in range(end)]
            tokens.append(mixed(state, *read) % VOCAB if sequence.sample else -1)
            self.computed += len(sequence.tokens)
        return StepDone(tokens, ExpertStats(1, 3, 2, 1, 640))

    def spoil(self, sequences: list[SequenceStep]) -> None:
        """What a failed step may leave."""
        for sequence in sequences:
            for slot in (sequence.state, *(slot for _, slot in sequence.snapshots)):
                self._states[slot] = GARBAGE
            for position in range(sequence.start, sequence.start + len(sequence.tokens)):
                self._kv[self._place(sequence.pages, position)] = GARBAGE

    def _take_in(self, sequence: SequenceStep, decoded: bool) -> int:
        """The state behind the new tokens. Their KV is written, and snapshots are made on the way."""
        state = 0
        if sequence.start:
            state = self._states[sequence.state if sequence.restore < 0 else sequence.restore]
        kept = dict(sequence.snapshots)
        at, end = sequence.start, sequence.start + len(sequence.tokens)
        while at < end:
            until = min(end, at + self._piece, *(position for position in kept if position > at))
            state = mixed(state, decoded, until - at)
            for position in range(at, until):
                state = mixed(state, sequence.tokens[position - sequence.start])
                self._kv[self._place(sequence.pages, position)] = state
            if until in kept:
                self._states[kept[until]] = state
            at = until
        self._states[sequence.state] = state
        return state

    def _place(self, pages: list[int], position: int) -> tuple[int, int]:
        return pages[position // self._page_tokens], position % self._page_tokens
