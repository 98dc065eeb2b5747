# mypy: allow-untyped-calls
"""A whole model on a GPU: against the host's run of the same checkpoint, and against itself by other ways."""

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.protocol import Dtype
from tests.worker.device_model import GREEDY, LONGEST, PAGE_TOKENS, device_model, prompt
from tests.worker.resident_experts import resident_runner
from worker.protocol import Changes, Mode, RunStep, Sampling, SequenceStep

pytestmark = pytest.mark.gpu

SIZES = Sizes(
    layers=3, hidden=64, intermediate=32, experts=16, experts_per_token=4, heads=4, kv_heads=2, vocab_size=512
)
WARM = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)
SEEN = np.arange(0, 512, 3, dtype=np.int32).tobytes()
CHANGED = Changes(1.3, 0.5, 0.25, seen=SEEN, counts=SEEN, bias={5: 2.0, 400: -3.0})
ASKING = Sampling(temperature=0.8, min_p=0.05, seed=8, changes=CHANGED, logprobs=3)
HELD = replace(ASKING, changes=replace(CHANGED, allowed=b"\x92\x00\x10\x02" * 3))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_random_model(path, SIZES)
    return str(path)


def test_the_routing_of_graphs_is_logged(directory: str) -> None:
    """Against the counts of the same decode steps, of which all but the first are replayed."""
    with device_model(directory, "float32", graphs=True) as device:
        for token in range(5):
            device.runner.run(RunStep("decode", [SequenceStep(0, [token], 0, [0], GREEDY)]))
        window = device.rig.slots.log.take()
        assert window is not None and window.decodes == [True] * 5
        assert (window.routed.sum(0) == device.rig.slots.decode_routing.numpy()).all()
        assert window.hits <= window.figures().oracle_hits


def test_logits_are_the_hosts(directory: str) -> None:
    """float32, at every position, prefill whole and with a cached prefix, then decode; the host is held against
    transformers elsewhere."""
    tokens = prompt(41, 0)
    host = resident_runner(directory, "float32", 64, PAGE_TOKENS)
    with device_model(directory, "float32") as device:
        parts: tuple[tuple[Mode, int, int], ...] = (("demand", 0, 17), ("streamed", 17, 40), ("decode", 40, 41))
        for mode, first, last in parts:
            pages = list(range(-(-last // PAGE_TOKENS)))
            step = RunStep(mode, [SequenceStep(0, tokens[first:last], first, pages, GREEDY)])
            expected, actual = host.run_full(step), device.runner.run_full(step)
            torch.testing.assert_close(actual.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-4)
            assert actual.result.tokens == expected.result.tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_demand_and_streamed_prefill_have_the_same_bits(directory: str, dtype: Dtype) -> None:
    """Hidden states, logits and KV; a pool smaller than a layer's experts, one that fits, one for everything."""
    tokens = prompt(LONGEST, 1)
    seen = []
    for slots in (8, 16, 60):
        for mode in ("demand", "streamed", "demand"):
            with device_model(directory, dtype, slots) as device:
                device.prefill(9, prompt(12, 2), [60], mode="demand")
                step = RunStep(mode, [SequenceStep(0, tokens, 0, list(range(7)), GREEDY)])
                full = device.runner.run_full(step)
                kv = [pages[:7].clone() for layer in device.kv.layers for pages in (layer.k, layer.v)]
                seen.append([full.hidden, full.logits, *kv])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_graphs_decode_what_eager_steps_decode(directory: str, batch: int) -> None:
    """Token by token and in the KV that is written, greedy, drawn and from changed logits with their log-probabilities,
    with experts coming and going."""
    texts: list[list[list[int]]] = []
    told: list[list[object]] = [[], []]
    sums: list[list[float]] = []
    for graphs in (False, True):
        with device_model(directory, "bfloat16", graphs=graphs) as device:
            pages = [[8 * s + p for p in range(4)] for s in range(batch)]
            lengths = [5 + 2 * s for s in range(batch)]
            prompts = [prompt(length, s) for s, length in enumerate(lengths)]
            last = [device.prefill(s, text, pages[s][:1]) for s, text in enumerate(prompts)]
            texts.append([last])
            for i in range(20):
                step = RunStep("decode", decode_rows(last, [length + i for length in lengths], pages))
                done = device.runner.run(step)
                last = done.tokens
                texts[-1].append(last)
                told[graphs].append(done.logprobs)
            sums.append([layer.k.double().sum().item() for layer in device.kv.layers])
            if device.graphs is not None:
                assert device.graphs.sizes == [batch, 8]
            device.rig.residents()
    assert texts[0] == texts[1] and sums[0] == sums[1] and told[0] == told[1]


def decode_rows(last: Sequence[int], starts: Sequence[int], pages: Sequence[list[int]]) -> list[SequenceStep]:
    return [
        SequenceStep(s, [last[s]], start, pages[s][: start // PAGE_TOKENS + 1], (GREEDY, WARM, ASKING, HELD)[s % 4])
        for s, start in enumerate(starts)
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_kv_and_embedding_in_host_memory_give_the_same_bits(directory: str, graphs: bool) -> None:
    """Prefill on demand and streamed, over a cached prefix, then decode of two sequences, eager and by graph: tokens,
    and the KV that is written, against the same in device memory; no graph is missing."""
    seen: list[list[object]] = []
    pages_of: list[list[torch.Tensor]] = []
    for in_host_memory in (False, True):
        with device_model(directory, "bfloat16", graphs=graphs, in_host_memory=in_host_memory) as device:
            pages = [list(range(7)), list(range(8, 15))]
            text = prompt(70, 4)
            last = [device.prefill(0, text[:33], pages[0][:3], "streamed"), device.prefill(1, text, pages[1][:5])]
            step = RunStep("demand", [SequenceStep(0, text[33:], 33, pages[0][:5], GREEDY)])
            last[0] = device.runner.run(step).tokens[0]
            told: list[object] = [list(last)]
            for i in range(20):
                done = device.runner.run(RunStep("decode", decode_rows(last, [70 + i] * 2, pages)))
                last = done.tokens
                told.append(done.tokens)
            seen.append(told)
            pages_of.append([(each + 0).cpu() for layer in device.kv.layers for each in (layer.k, layer.v)])
            assert device.graphs is None or device.graphs.sizes == [2, 8]
    assert seen[0] == seen[1]
    assert all(torch.equal(a, b) for a, b in zip(*pages_of, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_in_a_step_waits_for_the_device(directory: str) -> None:
    """Counted by torch, which raises at any call that synchronises; once everything is compiled."""
    with device_model(directory, "bfloat16") as device:
        parts: list[tuple[Mode, int, Sampling]] = [
            ("demand", 9, GREEDY),
            ("streamed", 9, GREEDY),
            ("decode", 1, GREEDY),
        ]
        parts += [("demand", 9, ASKING), ("decode", 1, ASKING), ("decode", 1, HELD)]
        for mode, rows, sampling in parts:
            step = RunStep(mode, [SequenceStep(0, prompt(rows, 3), 0, [0], sampling)])
            device.runner.run(step)
            torch.cuda.set_sync_debug_mode("error")
            try:
                device.runner.run(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_what_the_pool_took_comes_back(directory: str, tmp_path: Path) -> None:
    """Device memory, against what was free before."""

    def free_after(times: int) -> int:
        for _ in range(times):
            with device_model(directory, "float32", slots=4000):
                pass
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # of every stream that there was, 32 MiB each
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    free = free_after(2)  # what torch and the driver keep is theirs from then on
    assert free_after(3) >= free
