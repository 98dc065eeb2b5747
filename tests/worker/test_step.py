"""StepRunner against itself, call by call, and against the protocol's words."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from copyengine.wire.errors import ConfigError, CopyFailed, RequestRefused
from kernels.formats import layout
from tests.worker.random_weights import random_weights
from tests.worker.resident_experts import CPU, ResidentExperts, ResidentGroup
from worker.dense_steps import DenseSteps
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import NOT_FINITE, Changes, ExpertStats, RunStep, Sampling, SequenceStep
from worker.step import StepRunner

GREEDY = Sampling()
WARM = Sampling(temperature=1.0, seed=5)
PAGE_TOKENS = 4


class FailingExperts(ResidentExperts):
    """Fails in the second group of a layer, once."""

    fail = True
    error: Exception = CopyFailed("the disk is on fire")

    def groups(self, layer: int, experts: list[int]) -> Iterator[ResidentGroup]:
        for count, group in enumerate(super().groups(layer, experts)):
            if count == 1 and self.fail:
                self.fail = False
                raise self.error
            yield group


def small_spec() -> ModelSpec:
    layer = LayerSpec(GqaSpec(4, 2, 8, False, True, RopeSpec(1e4)), MoeSpec(8, 2, 16, True))
    return ModelSpec("Qwen3MoeForCausalLM", 50, 32, 1e-6, 64, True, "float32", (layer, layer))


def runner_with(
    experts: ResidentExperts, weights: dict[str, torch.Tensor] | None = None, spec: ModelSpec | None = None
) -> StepRunner:
    spec = spec or small_spec()
    record = layout("float32", 32, 16)
    pool = torch.randn(16, record.record_nbytes // 4, generator=torch.Generator().manual_seed(5)) * 0.3
    kv = KvCache(spec, 20, PAGE_TOKENS, torch.float32, CPU)
    pool_of = HostExperts(experts, pool.view(torch.uint8), record, 8)
    return StepRunner(spec, build_model(spec, weights or random_weights(spec), kv, pool_of), kv, experts)


@pytest.fixture
def runner() -> StepRunner:
    return runner_with(ResidentExperts(2, 8))


def words(*values: int) -> bytes:
    """int32 words."""
    return np.array(values, np.int32).tobytes()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_run_draws_what_run_full_computes(runner: StepRunner) -> None:
    """Against the argmax of run_full's logits at the sequences' last positions."""
    a = SequenceStep(1, prompt(5), 0, [3, 4], GREEDY)
    b = SequenceStep(2, prompt(7, 1), 0, [6, 2], None)
    c = SequenceStep(3, prompt(1, 2), 0, [9], GREEDY)
    full = runner.run_full(RunStep("demand", [a, b, c]))
    tokens = runner.run(RunStep("demand", [a, b, c])).tokens
    assert full.hidden.shape == (13, 32) and full.logits.shape == (13, 50)
    assert tokens == [int(full.logits[4].argmax()), -1, int(full.logits[12].argmax())]
    assert full.result.tokens == tokens


def test_sequences_of_one_step_do_not_see_each_other(runner: StepRunner) -> None:
    """Against each sequence run alone; float32 matmuls of other sizes differ in the last bits, hence the tolerance."""
    ids = [prompt(9), prompt(3, 1), prompt(12, 2)]
    pages = [[0, 1, 2], [5], [8, 7, 6]]
    steps = [SequenceStep(i, tokens, 0, own) for i, (tokens, own) in enumerate(zip(ids, pages, strict=True))]
    together = torch.split(runner.run_full(RunStep("demand", steps)).logits, [9, 3, 12])
    for step, rows in zip(steps, together, strict=True):
        torch.testing.assert_close(rows, runner.run_full(RunStep("demand", [step])).logits, rtol=1e-4, atol=1e-4)


def test_a_mixed_decode_batch_continues_each_sequence(runner: StepRunner) -> None:
    """Against one prefill of each whole sequence."""
    ids = [prompt(6), prompt(13, 1)]
    pages = [[1, 2], [3, 4, 5, 6]]
    for i in range(2):
        runner.run(RunStep("demand", [SequenceStep(i, ids[i][:-1], 0, pages[i][: -(-(len(ids[i]) - 1) // 4)])]))
    last = [SequenceStep(i, ids[i][-1:], len(ids[i]) - 1, pages[i]) for i in range(2)]
    decoded = runner.run_full(RunStep("decode", last)).logits
    for i in range(2):
        whole = runner.run_full(RunStep("streamed", [SequenceStep(i, ids[i], 0, pages[i])])).logits[-1]
        torch.testing.assert_close(decoded[i], whole, rtol=1e-4, atol=1e-4)


def test_the_same_seed_draws_the_same_token_in_any_batch(runner: StepRunner) -> None:
    """Against the token drawn alone; the draw is at the position after the last token."""
    mine = SequenceStep(1, prompt(5), 0, [0, 1], WARM)
    alone = runner.run(RunStep("demand", [mine])).tokens[0]
    for other in (GREEDY, WARM, Sampling(temperature=2.0, seed=99), None):
        batch = RunStep("demand", [SequenceStep(2, prompt(4, 3), 0, [5], other), mine])
        assert runner.run(batch).tokens[1] == alone
    drawn = {
        runner.run(RunStep("demand", [msgspec.structs.replace(mine, sample=Sampling(1.0, seed=seed))])).tokens[0]
        for seed in (-1, 2**64, 2**63, *range(20))
    }
    assert len(drawn) > 3


def test_the_slots_hear_of_begin_and_end() -> None:
    """Against the protocol of StepExperts."""
    experts = ResidentExperts(2, 8)
    result = runner_with(experts).run(RunStep("streamed", [SequenceStep(0, [1, 2], 0, [0], GREEDY)]))
    assert experts.calls == ["begin streamed", "end"] and result.stats == ExpertStats(steps=1)


def test_an_error_in_a_step_aborts_it_and_the_next_one_works() -> None:
    """Against the same step on a runner that never failed."""
    experts = FailingExperts(2, 8, group=1)
    failing, sound = runner_with(experts), runner_with(ResidentExperts(2, 8))
    step = RunStep("demand", [SequenceStep(0, prompt(9), 0, [0, 1, 2], GREEDY)])
    with pytest.raises(CopyFailed):
        failing.run(step)
    assert experts.calls == ["begin demand", "abort"]
    assert torch.equal(failing.run_full(step).logits, sound.run_full(step).logits)


def test_a_step_that_finds_no_memory_says_what_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are told first, then torch gives back what it keeps; the next step computes what it always did."""
    experts = FailingExperts(2, 8, group=1)
    experts.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of ...")
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: experts.calls.append("empty"))
    failing, sound = runner_with(experts), runner_with(ResidentExperts(2, 8))
    step = RunStep("demand", [SequenceStep(0, prompt(9), 0, [0, 1, 2], GREEDY)])
    with pytest.raises(RequestRefused) as refused:
        failing.run(step)
    assert experts.calls == ["begin demand", "abort", "empty"]
    assert refused.value.code == "device_out_of_memory"
    assert refused.value.detail == (
        "a demand step of 9 tokens did not fit in the device's memory: CUDA out of memory. Tried to allocate 2.00 GiB; "
        "lower --chunked-prefill-size or --slots, or raise --vram-reserve-bytes"
    )
    assert torch.equal(failing.run_full(step).logits, sound.run_full(step).logits)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sequence_without_finite_logits_has_no_token_and_the_others_have_theirs(
    sampling: Sampling, bad: float
) -> None:
    """Against the same step before an embedding was damaged; the pages written to serve a shorter sequence after it,
    against a page that nothing bad was written to."""
    spec = msgspec.structs.replace(small_spec(), tie_word_embeddings=False)
    experts, weights = ResidentExperts(2, 8), random_weights(spec)
    embed = weights["embed"]
    runner = runner_with(experts, weights | {"head": embed.clone()}, spec)
    asking = msgspec.structs.replace(sampling, logprobs=1)
    sequences = [
        SequenceStep(7, [1, 2], 0, [3], sampling),
        SequenceStep(8, [49, 3, 4], 0, [5], asking),
        SequenceStep(9, [4, 49], 0, [6], None),
        SequenceStep(10, [6], 0, [7], asking),
    ]
    step = RunStep("demand", sequences)
    sound, row = runner.run(step), embed[49].clone()
    embed[49] = bad
    experts.calls.clear()
    done = runner.run(step)
    assert experts.calls == ["begin demand", "end"]
    assert done.tokens == [sound.tokens[0], NOT_FINITE, NOT_FINITE, sound.tokens[3]]
    assert sound.logprobs and done.logprobs and done.logprobs[:3] == [None, None, None]
    assert sound.logprobs[3] and done.logprobs[3] and done.logprobs[3].ids == sound.logprobs[3].ids
    embed[49] = row
    after = [runner.run_full(RunStep("demand", [SequenceStep(9, [8, 9], 0, [page])])) for page in (5, 6, 11)]
    assert all(torch.equal(full.logits, after[-1].logits) for full in after)


GOOD = SequenceStep(0, [1, 2, 3, 4, 5], 0, [0, 1], GREEDY)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": []}, "0 new tokens"),
        ({"tokens": [1, 2, 3, 4, 50]}, "token ids"),
        ({"tokens": [1, 2, 3, 4, -1]}, "token ids"),
        ({"start": -1}, "outside"),
        ({"start": 60}, "outside"),
        ({"pages": [0]}, "take 2 pages"),
        ({"pages": [0, 1, 2]}, "take 2 pages"),
        ({"pages": [0, 20]}, "KV pages"),
        ({"pages": [-1, 1]}, "KV pages"),
        ({"pages": [1, 1]}, "twice"),
        ({"sample": Sampling(temperature=-0.5)}, "temperature"),
        ({"sample": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sample": Sampling(top_p=0.0)}, "top_p"),
        ({"sample": Sampling(top_k=-1)}, "top_k"),
        ({"sample": Sampling(top_k=2**63)}, "top_k"),
        ({"sample": Sampling(min_p=1.5)}, "min_p"),
        ({"sample": Sampling(min_p=float("nan"))}, "min_p"),
        ({"sample": Sampling(logprobs=-1)}, "logprobs"),
        ({"sample": Sampling(logprobs=21)}, "logprobs"),
        ({"sample": Sampling(changes=Changes(repetition=0.0))}, "repetition"),
        ({"sample": Sampling(changes=Changes(presence=float("nan")))}, "penalties"),
        ({"sample": Sampling(changes=Changes(frequency=float("inf")))}, "penalties"),
        ({"sample": Sampling(changes=Changes(bias={3: float("nan")}))}, "biases"),
        ({"sample": Sampling(changes=Changes(bias={50: 1.0}))}, "changed logits must be in 0 .. 49"),
        ({"sample": Sampling(changes=Changes(bias={-1: 1.0}))}, "changed logits"),
        ({"sample": Sampling(changes=Changes(seen=words(4, 50), counts=words(0, 1)))}, "changed logits"),
        ({"sample": Sampling(changes=Changes(seen=words(4, 5), counts=words(0)))}, "as many words"),
        ({"sample": Sampling(changes=Changes(seen=b"abc", counts=b"abc"))}, "as many words"),
        ({"sample": Sampling(changes=Changes(allowed=bytes(7)))}, "allowed has 7 bytes: must be at most 2 words"),
        ({"sample": Sampling(changes=Changes(allowed=bytes(12)))}, "allowed has 12 bytes"),
        ({"sample": Sampling(changes=Changes(seen=words(4, 5), counts=words(0, -1)))}, "not be negative"),
    ],
)
def test_a_step_that_asks_for_what_is_not_there_is_refused(change: dict[str, object], match: str) -> None:
    """Against the protocol; nothing has begun then."""
    experts = ResidentExperts(2, 8)
    runner = runner_with(experts)
    with pytest.raises(RequestRefused, match=match) as caught:
        runner.run(RunStep("demand", [msgspec.structs.replace(GOOD, **change)]))
    assert caught.value.code == "invalid_request" and experts.calls == []


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (RunStep("decode", [GOOD]), "decode step cannot have 5"),
        (RunStep("demand", [GOOD, msgspec.structs.replace(GOOD, pages=[2, 3])]), "twice"),
        (RunStep("demand", [GOOD, msgspec.structs.replace(GOOD, sequence=1, pages=[2, 1])]), "same KV page"),
    ],
)
def test_sequences_that_do_not_fit_together_are_refused(runner: StepRunner, step: RunStep, match: str) -> None:
    """Against the protocol."""
    with pytest.raises(RequestRefused, match=match):
        runner.run(step)


def test_two_sequences_may_read_a_page_that_neither_writes(runner: StepRunner) -> None:
    """Against sequences with pages of their own: a shared prefix of one full page."""
    prefix, tails = prompt(4), [prompt(3, 1), prompt(2, 2)]
    runner.run(RunStep("demand", [SequenceStep(0, prefix, 0, [9])]))
    shared = [SequenceStep(i, tail, 4, [9, i]) for i, tail in enumerate(tails)]
    rows = torch.split(runner.run_full(RunStep("demand", shared)).logits, [3, 2])
    for tail, mine in zip(tails, rows, strict=True):
        whole = runner.run_full(RunStep("demand", [SequenceStep(5, prefix + tail, 0, [14, 15])])).logits[4:]
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)


def test_a_dense_model_needs_no_slots() -> None:
    """Against the protocol: its steps count, its expert traffic is nothing."""
    moe = small_spec()
    layer = LayerSpec(moe.layers[0].attention, DenseSpec(16))
    spec = msgspec.structs.replace(moe, architecture="Qwen3ForCausalLM", layers=(layer, layer))
    kv = KvCache(spec, 2, PAGE_TOKENS, torch.float32, CPU)
    dense = StepRunner(spec, build_model(spec, random_weights(spec), kv, None), kv, DenseSteps())
    result = dense.run(RunStep("demand", [SequenceStep(0, [1, 2, 3], 0, [0], GREEDY)]))
    assert result.stats == ExpertStats(steps=1) and 0 <= result.tokens[0] < 50


@pytest.mark.parametrize(
    ("change", "match"), [({"extra": torch.ones(1)}, "extra"), ({"final_norm": None}, "final_norm")]
)
def test_weights_left_over_or_missing_are_refused(change: dict[str, torch.Tensor | None], match: str) -> None:
    """Against the docstring of build_model."""
    spec = small_spec()
    given = random_weights(spec) | change
    weights = {name: tensor for name, tensor in given.items() if tensor is not None}
    record = layout("float32", 32, 16)
    pool = HostExperts(ResidentExperts(2, 8), torch.zeros(16, record.record_nbytes, dtype=torch.uint8), record, 8)
    with pytest.raises(ConfigError, match=match):
        build_model(spec, weights, KvCache(spec, 2, PAGE_TOKENS, torch.float32, CPU), pool)


def test_an_unknown_architecture_is_refused() -> None:
    """Against the docstring of build_model."""
    spec = msgspec.structs.replace(small_spec(), architecture="GptForCausalLM")
    with pytest.raises(ConfigError, match="GptForCausalLM"):
        build_model(spec, {}, KvCache(spec, 2, PAGE_TOKENS, torch.float32, CPU), None)
