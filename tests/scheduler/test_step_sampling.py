"""Counts kept token by token against collections.Counter over the whole answer."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.protocol import Sampling
from scheduler.step_sampling import seen_tokens, step_sampling
from worker.protocol import Changes
from worker.protocol import Sampling as StepSampling

TOKENS = st.lists(st.integers(0, 9), max_size=30)


def counts(changes: Changes) -> dict[int, int]:
    ids, numbers = array("i", changes.seen).tolist(), array("i", changes.counts).tolist()
    assert len(set(ids)) == len(ids) == len(numbers)
    return dict(zip(ids, numbers, strict=True))


@given(TOKENS, TOKENS, st.sampled_from([(1.5, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.5), (0.5, 1.0, 1.0)]))
def test_the_counts_are_those_of_the_whole_answer(
    prompt: list[int], answer: list[int], penalties: tuple[float, float, float]
) -> None:
    """The prompt's tokens are there, at 0, for the repetition penalty alone."""
    seen = seen_tokens(Changes(*penalties, bias={3: 1.0}), prompt)
    assert seen is not None
    for token in answer:
        seen.add(token)
    told = seen.told()
    base = dict.fromkeys(prompt, 0) if penalties[0] != 1 else {}
    assert counts(told) == base | Counter(answer)
    assert (told.repetition, told.presence, told.frequency, told.bias) == (*penalties, {3: 1.0})


def test_without_penalties_nothing_is_kept() -> None:
    """Against the docstring."""
    assert seen_tokens(None, [1]) is None
    assert seen_tokens(Changes(bias={1: 2.0}), [1]) is None


def test_every_setting_reaches_the_worker() -> None:
    """Against the two protocols; what is off costs nothing on the way."""
    assert step_sampling(Sampling(), 7) == StepSampling(seed=7)
    stated = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -1.0},
        logprobs=3,
    )
    assert step_sampling(stated, 7) == StepSampling(0.5, 0.9, 4, 7, 0.1, Changes(1.1, 0.2, 0.3, bias={5: -1.0}), 3)
