# mypy: allow-untyped-calls
"""The slot pool on a device: in Triton's interpreter with a copier over shared memory, and on a GPU.

What is checked, and against what, is in device_slots_checks.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from copyengine.device import CopyDevice
from kernels.formats import layout
from kernels.grouped_gemm import InputScales
from tests.kernels.expert_records import KINDS, Experts
from tests.worker import device_slots_checks as checks
from tests.worker.device_rig import Place, Rig, on_gpu, rig_on
from tests.worker.random_weights import random_bank
from worker.expert_stats import MODES
from worker.geometry import SlotGeometry
from worker.protocol import Mode

ROOT = Path(__file__).parent.parent.parent
REPEATS = 50


@pytest.mark.parametrize(
    ("histories", "failing"), [("3", ["2"]), pytest.param("10", ["1", "2", "5", "8"], marks=pytest.mark.slow)]
)
def test_in_the_interpreter(histories: str, failing: list[str]) -> None:
    """In a process of its own, for Triton looks at TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.worker.device_slots_checks", histories, *failing],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.gpu
def test_random_histories_on_a_gpu() -> None:
    checks.random_histories(on_gpu(), range(20), steps=20)


@pytest.mark.gpu
def test_a_failed_copy_ends_its_step_on_a_gpu() -> None:
    from copyengine.device.cuda import CudaCopyDevice

    copies = checks.FailingCopies(CudaCopyDevice(local=True))
    checks.failed_copies(copies, on_gpu(lambda: copies), (1, 2, 5, 8))


@pytest.mark.gpu
def test_a_copy_that_was_not_made_ends_its_step_on_a_gpu() -> None:
    from copyengine.device.cuda import CudaCopyDevice

    copies = checks.LyingCopies(CudaCopyDevice(local=True))
    checks.damaged_copies(copies, on_gpu(lambda: copies), tuple(itertools.product((1, 2, 4), MODES)))


@pytest.mark.gpu
def test_a_slot_whose_bytes_change_is_found_on_a_gpu() -> None:
    checks.damaged_slots(on_gpu())


@pytest.mark.gpu
def test_a_release_ends_the_steps_on_a_gpu() -> None:
    checks.released(on_gpu())


@pytest.mark.gpu
def test_a_silent_copy_engine_is_given_up_on_a_gpu() -> None:
    checks.silent(on_gpu())


@contextmanager
def slow_copies() -> Iterator[Place]:
    """Each copy and each flag comes after a kernel on the copy side that idles for a while, of changing length."""
    from copyengine.device import Bank, Memory, Run, Stream
    from copyengine.device.cuda import CudaCopyDevice, CudaMemory

    class Slow(CudaCopyDevice):
        rng = random.Random(1)

        def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
            self._idle(stream, target)
            super().copy(stream, source, target, runs)

        def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
            self._idle(stream, flags)
            super().write_flag(stream, flags, index, value)

        def _idle(self, stream: Stream, target: Memory) -> None:
            assert isinstance(target, CudaMemory)
            with torch.cuda.stream(torch.cuda.ExternalStream(int(target.link.streams[stream]))):
                torch.cuda._sleep(self.rng.randrange(1, 200_000))  # up to 0.1 ms

    def make() -> CopyDevice:
        torch.cuda._sleep(1)  # loaded before a stream waits for the copies: loading would wait for it
        return Slow(local=True)

    yield on_gpu(make)


def poison(rig: Rig) -> None:
    """Bytes that are not numbers: in every slot, and in the memory that the next allocations get."""
    rig.slots.pool.fill_(0xFF)
    blocks = [torch.full((1 << 22,), float("nan"), device=rig.place.torch_device) for _ in range(16)]
    blocks += [torch.full((1 << 14,), float("nan"), device=rig.place.torch_device) for _ in range(64)]
    del blocks


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("slots", "query"), [(1100, 128), (8, 3)])
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_a_chunk_on_demand_has_the_bits_of_the_streamed_one(kind: str, slots: int, query: int) -> None:
    """600 tokens, 1,200 routes over 8 experts, after decode left other experts resident: over 1,100 slots, and over a
    pool of one layer's experts filled three per query. 50 times, slots and free memory poisoned, the copy side slow.
    No decode statistic moves."""
    record = layout(KINDS.get(kind, kind), 256, 128)
    scales = [InputScales(0.001 * (1 + layer), 0.0002) for layer in range(checks.LAYERS)]
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(slots)
    banks = [Experts(kind, 256, 128, 8, generator).records.numpy() for _ in range(checks.LAYERS)]
    geometry = SlotGeometry(checks.LAYERS, 8, record.record_nbytes, slots, 2, query)
    rng = random.Random(slots)
    used = scales if record.kind.quantised_inputs else []
    with slow_copies() as place, rig_on(place, geometry, record, banks, input_scales=used) as rig:

        def given(tokens: int, k: int) -> checks.Routing:
            one = checks.routing(rng, place, 8, tokens, k, 256)
            return checks.Routing(one.x.to(dtype), one.weights, one.experts)

        sizes: dict[Mode, int] = {"demand": 600, "streamed": 600, "decode": 1}
        for mode, tokens in sizes.items():
            checks.rehearse(rig, mode, [given(tokens, 2)] * checks.LAYERS)
        for repeat in range(REPEATS):
            chunk = [given(600, 2) for _ in range(checks.LAYERS)]
            forget_all(rig)
            poison(rig)
            for _ in range(rng.randrange(4)):
                checks.step(rig, "decode", [given(1, 2) for _ in range(checks.LAYERS)])
            before = rig.slots.decode_routing, rig.slots.stats()["decode"]
            outs = {mode: outputs(rig, mode, chunk) for mode in modes(repeat)}
            after = rig.slots.decode_routing, rig.slots.stats()["decode"]
            assert torch.equal(before[0], after[0]) and before[1] == after[1]
            for demand, streamed in zip(outs["demand"], outs["streamed"], strict=True):
                assert torch.equal(demand, streamed)
                assert bool(demand.isfinite().all())


def modes(repeat: int) -> list[Mode]:
    """Both, in turn the one and the other first."""
    return ["demand", "streamed"] if repeat % 2 else ["streamed", "demand"]


def outputs(rig: Rig, mode: Mode, chunk: Sequence[checks.Routing]) -> list[torch.Tensor]:
    rig.slots.begin_step(mode)
    outs = [rig.slots(layer, *given) for layer, given in enumerate(chunk)]
    rig.slots.collect(torch.empty(0, dtype=torch.int64, device=outs[0].device))
    rig.slots.end_step()
    return outs


def forget_all(rig: Rig) -> None:
    tables = rig.slots.tables
    tables.slot_of.fill_(-1)
    tables.owner.fill_(-1)
    tables.last_used.fill_(-1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("verify", [False, True])
def test_nothing_in_a_layer_waits_for_the_device(verify: bool) -> None:
    """Counted by torch, which raises at any call that synchronises; once everything is compiled."""
    record = layout("bfloat16", 128, 64)
    place = on_gpu()
    banks = [random_bank(record, 8, torch.bfloat16, seed) for seed in range(checks.LAYERS)]
    rng = random.Random(1)
    geometry = SlotGeometry(checks.LAYERS, 8, record.record_nbytes, 12, 2, 4, logged_steps=6)
    with rig_on(place, geometry, record, banks, verify=verify) as rig:
        for mode in ("demand", "streamed", "decode"):
            one = [checks.routing(rng, place, 8, 5, 2, 128) for _ in range(checks.LAYERS)]
            chunk = [checks.Routing(g.x.to(torch.bfloat16), g.weights, g.experts) for g in one]
            outputs(rig, mode, chunk)
            rig.slots.begin_step(mode)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for layer, given in enumerate(chunk):
                    rig.slots(layer, *given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            rig.slots.collect(torch.empty(0, dtype=torch.int64, device=place.torch_device))
            rig.slots.end_step()
