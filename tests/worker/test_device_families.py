# mypy: allow-untyped-calls
"""Every family on a GPU, in float32, against transformers' logits and greedy tokens; and by its different ways."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from copyengine.checkpoint.model import open_model
from tests.worker.device_model import GREEDY, PAGE_TOKENS, Device, device_model
from tests.worker.model.test_pre_norm import relative_error, state_of
from tests.worker.transformers_oracle import CASES, NEW_TOKENS, PROMPT_TOKENS
from worker.protocol import Mode, RunStep, SequenceStep
from worker.step import FullResult

pytestmark = pytest.mark.gpu

BOUND = 2e-4
"""Of the largest difference of a position's logits over its largest logit."""


def full(device: Device, mode: Mode, tokens: list[int], start: int, state: int) -> FullResult:
    pages = list(range(3, 3 - (-(start + len(tokens)) // PAGE_TOKENS)))
    return device.runner.run_full(RunStep(mode, [SequenceStep(0, tokens, start, pages, GREEDY, state)]))


def slots_for(checkpoint: Path) -> int | None:
    """Fewer than its experts; None for a dense model."""
    spec = open_model(checkpoint).spec
    moe = spec.moe
    return max(moe.experts, len(spec.moe_layers) * moe.experts // 2) if moe else None


@pytest.mark.parametrize("case", CASES)
def test_a_family_on_a_gpu_is_that_of_transformers(case: str, goldens: Path) -> None:
    """Logits of a prefill, whole on demand and streamed with the same bits, and in chunks; of decode, by graph from the
    second step on; and the greedy tokens."""
    slots = slots_for(goldens / case)
    if slots is None:
        pytest.skip("no experts")
    if open_model(goldens / case).spec.expert_format.name:
        pytest.skip("quantised experts are computed in bfloat16 on a GPU")
    golden = np.load(goldens / f"{case}.npz")
    ids, state = golden["ids"].tolist(), state_of(case)
    with device_model(str(goldens / case), "float32", slots, graphs=True) as device:
        whole = [full(device, mode, ids, 0, state) for mode in ("demand", "streamed")]
        assert relative_error(whole[0].logits.cpu(), golden["logits"]) <= BOUND
        assert torch.equal(whole[0].logits, whole[1].logits)
        cuts = [0, 1, 8, 21, PROMPT_TOKENS]
        rows = [full(device, "demand", ids[a:b], a, state).logits.cpu() for a, b in pairwise(cuts)]
        rows += [full(device, "decode", ids[a : a + 1], a, state).logits.cpu() for a in range(PROMPT_TOKENS, len(ids))]
        assert relative_error(torch.cat(rows), golden["logits"]) <= BOUND
        assert greedy(device, ids[:PROMPT_TOKENS], state) == ids[PROMPT_TOKENS:]
        assert device.graphs is not None and device.graphs.sizes == [1, 8]


def test_gpt_oss_in_mxfp4_on_a_gpu(goldens: Path) -> None:
    """In bfloat16, against transformers' logits in float32 at most positions, since a route may fall otherwise at a
    few; demand and streamed chunks, and decode by graph and before there is one, as equality."""
    golden = np.load(goldens / "gpt_oss_mxfp4.npz")
    ids = golden["ids"].tolist()
    slots = slots_for(goldens / "gpt_oss_mxfp4")
    assert slots is not None
    with device_model(str(goldens / "gpt_oss_mxfp4"), "bfloat16", slots, graphs=True) as device:
        demand, streamed = full(device, "demand", ids, 0, -1), full(device, "streamed", ids, 0, -1)
        assert torch.equal(demand.logits, streamed.logits)
        difference = np.abs(demand.logits.float().cpu().numpy() - golden["logits"]).max(axis=1)
        assert np.median(difference / np.abs(golden["logits"]).max(axis=1)) <= 0.1
        full(device, "demand", ids[:PROMPT_TOKENS], 0, -1)
        tail = range(PROMPT_TOKENS, len(ids))
        first, again = ([full(device, "decode", ids[a : a + 1], a, -1).logits for a in tail] for _ in range(2))
        assert torch.equal(torch.cat(first), torch.cat(again))


def greedy(device: Device, prompt: list[int], state: int) -> list[int]:
    answer = [device.prefill(1, prompt, list(range(20, 23)), "demand", state)]
    while len(answer) < NEW_TOKENS:
        start = len(prompt) + len(answer) - 1
        pages = list(range(20, 21 + start // PAGE_TOKENS))
        step = RunStep("decode", [SequenceStep(1, answer[-1:], start, pages, GREEDY, state)])
        answer += device.runner.run(step).tokens
    return answer
