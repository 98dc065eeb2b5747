"""Whole models against transformers' own of the same family, in float32."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.resident_experts import resident_runner
from tests.worker.transformers_oracle import CASES, NEW_TOKENS, PROMPT_TOKENS, RECURRENT
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import FullResult, StepRunner

PAGE_TOKENS = 4
PAGES = list(reversed(range(5, 40)))
GREEDY = Sampling(temperature=0.0)


def state_of(case: str) -> int:
    """The state slot of the one sequence that is computed."""
    return 2 if case in RECURRENT else -1


def full(runner: StepRunner, mode: Mode, tokens: list[int], start: int, state: int = -1) -> FullResult:
    used = PAGES[: -(-(start + len(tokens)) // PAGE_TOKENS)]
    return runner.run_full(RunStep(mode, [SequenceStep(0, tokens, start, used, GREEDY, state)]))


def relative_error(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """Largest difference at any position over the largest logit of that position; the worst position's."""
    difference = np.abs(ours.numpy() - theirs).max(axis=-1)
    return float((difference / np.abs(theirs).max(axis=-1)).max())


@pytest.mark.parametrize("case", CASES)
def test_one_prefill_gives_the_logits_of_transformers_at_every_position(case: str, goldens: Path) -> None:
    golden = np.load(goldens / f"{case}.npz")
    runner = resident_runner(str(goldens / case))
    computed = full(runner, "streamed", golden["ids"].tolist(), 0, state_of(case))
    assert computed.logits.shape == golden["logits"].shape
    assert relative_error(computed.logits, golden["logits"]) <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_chunked_prefill_then_decode_gives_them_too(case: str, goldens: Path) -> None:
    golden = np.load(goldens / f"{case}.npz")
    ids = golden["ids"].tolist()
    runner = resident_runner(str(goldens / case), group=3)
    cuts = [0, 1, 8, 21, PROMPT_TOKENS, *range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS + 1)]
    steps = pairwise(cuts)
    rows = [
        full(runner, "decode" if b > PROMPT_TOKENS else "demand", ids[a:b], a, state_of(case)).logits for a, b in steps
    ]
    assert relative_error(torch.cat(rows), golden["logits"]) <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation_is_that_of_transformers_token_for_token(case: str, goldens: Path) -> None:
    ids = np.load(goldens / f"{case}.npz")["ids"].tolist()
    runner = resident_runner(str(goldens / case))
    answer: list[int] = []
    tokens, start = ids[:PROMPT_TOKENS], 0
    while len(answer) < NEW_TOKENS:
        used = PAGES[: -(-(start + len(tokens)) // PAGE_TOKENS)]
        mode: Mode = "decode" if start else "demand"
        answer += runner.run(RunStep(mode, [SequenceStep(7, tokens, start, used, GREEDY, state_of(case))])).tokens
        tokens, start = answer[-1:], start + len(tokens)
    assert answer == ids[PROMPT_TOKENS:]


def test_the_goldens_tell_positions_apart(goldens: Path) -> None:
    """Against itself: a model whose logits are all alike would match anything."""
    for case in CASES:
        golden = np.load(goldens / f"{case}.npz")
        largest = np.abs(golden["logits"]).max()
        assert np.ptp(golden["logits"], axis=0).min() > 0.05 * largest, case
        top = np.sort(golden["logits"][PROMPT_TOKENS - 1 : -1], axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-4 * largest, case
