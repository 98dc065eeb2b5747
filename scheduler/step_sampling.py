"""What a step is told about drawing a request's next token. Pure."""

from array import array
from collections.abc import Iterable

from msgspec.structs import replace

from scheduler.protocol import Sampling
from worker.protocol import Changes
from worker.protocol import Sampling as StepSampling


def step_sampling(sampling: Sampling, seed: int) -> StepSampling:
    """The same for the worker, without the tokens that penalties fall on."""
    changes = Changes(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        bias=sampling.logit_bias,
    )
    return StepSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        min_p=sampling.min_p,
        changes=None if changes == Changes() else changes,
        logprobs=sampling.logprobs,
    )


class SeenTokens:
    """The distinct tokens that penalties fall on, of an answer and for repetition of its prompt, with their counts.

    A token of the answer takes the same time whatever came before, and `told` copies two runs of bytes.
    """

    def __init__(self, changes: Changes, prompt: Iterable[int]) -> None:
        """`changes` without tokens."""
        penalised = dict.fromkeys(prompt) if changes.repetition != 1 else {}
        self._changes = changes
        self._places = {token: place for place, token in enumerate(penalised)}
        self._ids = array("i", penalised)
        self._counts = array("i", bytes(4 * len(penalised)))

    def add(self, token: int) -> None:
        """It was generated."""
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def told(self) -> Changes:
        """The changes with all tokens so far."""
        return replace(self._changes, seen=self._ids.tobytes(), counts=self._counts.tobytes())


def seen_tokens(changes: Changes | None, prompt: Iterable[int]) -> SeenTokens | None:
    """None if no penalty is on."""
    if changes is None or (changes.repetition, changes.presence, changes.frequency) == (1, 0, 0):
        return None
    return SeenTokens(changes, prompt)
