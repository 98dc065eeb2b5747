"""Checks of DeviceSlots on any device: `python -m tests.worker.device_slots_checks`, with TRITON_INTERPRET=1 on a CPU.

What a layer computes is checked against the same GEMM over a pool in which everything is resident, bit for bit;
counters and residents against sets of experts kept here.
"""

import itertools
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from copyengine.device import Bank, CopyDevice, Memory, Run, Stream
from copyengine.device.cuda_driver import CudaError
from copyengine.device.host import HostCopyDevice
from copyengine.wire.errors import CopyFailed, PeerDied, PeerTimeout, RequestRefused, SlotstreamError
from kernels import admit
from kernels.formats import RecordLayout, layout
from tests.worker.device_rig import HostedDevice, HostedStream, Place, Rig, hosted, rig_on
from tests.worker.random_weights import random_bank
from worker.copy_checks import MOST_DAMAGED_STEPS
from worker.expert_stats import MODES
from worker.geometry import SlotGeometry
from worker.protocol import ExpertStats, Mode

LAYERS, EXPERTS = 3, 6
TOKENS = (1, 2, 5)


class Routing(NamedTuple):
    """What a layer is given."""

    x: torch.Tensor  # [T, H]
    weights: torch.Tensor  # [T, K] float32
    experts: torch.Tensor  # [T, K] int32


def geometry_of(record: RecordLayout, slots: int, max_query: int, groups: int, experts: int = EXPERTS) -> SlotGeometry:
    return SlotGeometry(LAYERS, experts, record.record_nbytes, slots, groups, max_query)


def banks_of(record: RecordLayout, dtype: torch.dtype, experts: int = EXPERTS) -> list[np.ndarray]:
    return [random_bank(record, experts, dtype, seed) for seed in range(LAYERS)]


def routing(rng: random.Random, place: Place, experts: int, tokens: int, k: int, hidden: int) -> Routing:
    """Random; some steps route to few experts."""
    among = rng.sample(range(experts), rng.randint(k, experts))
    chosen = torch.tensor([rng.sample(among, k) for _ in range(tokens)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, k, generator=generator)
    where = place.torch_device
    return Routing(x.to(where), weights.to(where), chosen.to(where))


def step(rig: Rig, mode: Mode, layers: Sequence[Routing]) -> ExpertStats:
    """One step, each layer checked."""
    tokens = torch.tensor([5, -1], device=rig.place.torch_device)  # before the step: it would wait for the stream
    rig.slots.begin_step(mode)
    outs = [rig.slots(layer, *given) for layer, given in enumerate(layers)]
    assert rig.slots.collect(tokens) == [5, -1]
    stats = rig.slots.end_step()
    for layer, (out, given) in enumerate(zip(outs, layers, strict=True)):
        assert torch.equal(out, rig.expected(layer, *given)), f"{mode}, layer {layer}"
    return stats


def rehearse(rig: Rig, mode: Mode, layers: Sequence[Routing]) -> None:
    """Load what a step of this kind needs; the tables are as they were."""
    with rig.slots.rehearsal(mode):
        for layer, given in enumerate(layers):
            rig.slots(layer, *given)
    assert rig.residents() == set() and not rig.slots.decode_routing.any()


def routed(given: Sequence[Routing]) -> list[set[int]]:
    return [set(one.experts.flatten().tolist()) for one in given]


def random_histories(place: Place, seeds: Sequence[int], steps: int = 10) -> None:
    """Modes in any order, pools with room for a layer and without, queries of one, two, all; stream groups of the same.

    Outputs, counters, also by layer, residents, routing counts and the copy engine's own counters.
    """
    record = layout("float32", 16, 16)
    for seed in seeds:
        rng = random.Random(seed)
        slots, query = rng.choice([3, 4, 6, 9, 20]), rng.choice([1, 2, 3, 6])
        geometry = replace(geometry_of(record, slots, query, rng.choice([1, 2, 4])), logged_steps=steps // 2)
        geometry = replace(geometry, half_life=LAYERS * 8 if seed % 2 else 0)
        with rig_on(place, geometry, record, banks_of(record, torch.float32)) as rig:
            if place.torch_device.type == "cuda":  # a first launch may wait for a stream that waits for copies
                for mode, tokens in itertools.product(MODES, TOKENS):
                    rehearse(rig, mode, [routing(rng, place, EXPERTS, tokens, 2, 16)] * LAYERS)
            routing_counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
            misses = 0
            logged: list[tuple[Mode, list[set[int]], ExpertStats]] = []
            lookups = {mode: [0] * LAYERS for mode in MODES}
            start_s, waited_s = time.monotonic(), 0.0
            for _ in range(steps):
                mode, tokens = rng.choice(MODES), rng.choice(TOKENS)
                given = [routing(rng, place, EXPERTS, tokens, 2, 16) for _ in range(LAYERS)]
                before = rig.residents()
                assert {tuple(pair) for pair in np.argwhere(rig.slots.residency()).tolist()} == before
                stats = step(rig, mode, given)
                misses += stats.misses
                waited_s += stats.copy_wait_s
                asked = routed(given)
                if mode != "streamed":
                    logged.append((mode, asked, stats))
                if mode == "streamed":
                    assert rig.residents() == before
                    assert (stats.hits, stats.misses) == (len(before), LAYERS * EXPERTS - len(before))
                else:
                    assert stats.lookups == sum(len(experts) for experts in asked)
                    assert rig.residents() >= {(LAYERS - 1, e) for e in asked[-1]} or len(asked[-1]) > slots
                if mode == "decode":
                    for layer, experts in enumerate(asked):
                        routing_counts[layer, list(experts)] += 1
                assert stats.copied_nbytes == stats.misses * record.record_nbytes
                assert torch.equal(rig.slots.decode_routing, routing_counts)
                wanted = [EXPERTS] * LAYERS if mode == "streamed" else [len(experts) for experts in asked]
                lookups[mode] = [a + b for a, b in zip(lookups[mode], wanted, strict=True)]
                check_layers(rig, lookups)
            check_log(rig, logged[: steps // 2])
            rig.slots.forget()
            assert rig.slots.resident() == 0 and rig.residents() == set() and not rig.slots.residency().any()
            given = [routing(rng, place, EXPERTS, 1, 2, 16) for _ in range(LAYERS)]
            again = step(rig, "decode", given)
            misses += again.misses
            assert again.misses == again.lookups == sum(len(experts) for experts in routed(given))
            assert 0 < waited_s < time.monotonic() - start_s
            counters = rig.copier.stats().counters
            assert counters["demand"].records + counters["stream"].records == misses


def check_log(rig: Rig, steps: list[tuple[Mode, list[set[int]], ExpertStats]]) -> None:
    """The first steps that admit, from an empty pool; taken once."""
    window = rig.slots.log.take()
    assert window is not None and not window.resident.any() and rig.slots.log.take() is None
    for routed_then, decodes, (mode, asked, _) in zip(window.routed, window.decodes, steps, strict=True):
        assert [set(np.flatnonzero(row).tolist()) for row in routed_then] == asked and decodes == (mode == "decode")
    assert window.hits == sum(stats.hits for mode, _, stats in steps if mode == "decode")
    figures = window.figures()
    assert figures.hits == window.hits <= figures.oracle_hits <= figures.lookups


def check_layers(rig: Rig, lookups: dict[Mode, list[int]]) -> None:
    """The counters of each layer: as many lookups as there were, hits and misses that add up to the totals."""
    totals = rig.slots.stats()
    for mode, traffic in rig.slots.layer_stats().items():
        assert [a + b for a, b in zip(traffic.hits, traffic.misses, strict=True)] == lookups[mode]
        assert (sum(traffic.hits), sum(traffic.misses)) == (totals[mode].hits, totals[mode].misses)


class FailingCopies:
    """Another device's copies, of which the one that `fail_at` counts down to fails."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self.bank_threads = device.bank_threads
        self.allocate_bank, self.open, self.close = device.allocate_bank, device.open, device.close
        self.write_flag, self.mark, self.is_done = device.write_flag, device.mark, device.is_done
        self.fail_at = 0

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise CopyFailed("the link is cut")
        self._device.copy(stream, source, target, runs)


def failed_copies(copies: FailingCopies, place: Place, numbers: Sequence[int]) -> None:
    """A copy that fails ends its step and leaves only true residents; the next step works. In any mode the copies of
    these numbers."""
    record = layout("float32", 16, 16)
    for fail_at in numbers:
        for mode in ("demand", "streamed", "decode"):
            rng = random.Random(fail_at)
            with rig_on(place, geometry_of(record, 9, 2, 2), record, banks_of(record, torch.float32)) as rig:
                given = [routing(rng, place, EXPERTS, 5, 2, 16) for _ in range(LAYERS)]
                step(rig, "demand", [routing(rng, place, EXPERTS, 1, 2, 16) for _ in range(LAYERS)])
                copies.fail_at = fail_at
                try:
                    step(rig, mode, given)
                except CopyFailed:
                    rig.slots.abort_step()
                    failed = True
                else:
                    failed = False
                assert failed == (copies.fail_at <= 0), f"{mode}, copy {fail_at}"
                copies.fail_at = 0
                rig.residents()
                step(rig, "demand", given)
                step(rig, "streamed", given)
                rig.residents()


class LyingCopies(FailingCopies):
    """Another device's copies, of which the one that `fail_at` counts down to is not made, and nobody is told."""

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        self.fail_at -= 1
        if self.fail_at != 0:
            self._device.copy(stream, source, target, runs)


def damaged_copies(copies: LyingCopies, place: Place, cases: Sequence[tuple[int, Mode]]) -> None:
    """With --verify-copies a copy that was not made ends its step, whose error names an expert that is routed to,
    and leaves only true residents; the next steps work. `cases` are numbers of copies and their steps' modes.

    Without, the same history computes with what was there before: what the check finds was to be found.
    """
    record = layout("float32", 16, 16)
    geometry, banks = geometry_of(record, 9, 2, 2), banks_of(record, torch.float32)
    everything = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 3], [1, 4]], dtype=torch.int32, device=place.torch_device)
    for fail_at, mode in cases:
        for verify in (True, False):
            rng = random.Random(fail_at)
            with rig_on(place, geometry, record, banks, verify=verify) as rig:
                given = [routing(rng, place, EXPERTS, 5, 2, 16)._replace(experts=everything) for _ in range(LAYERS)]
                few = [routing(rng, place, EXPERTS, 1, 2, 16) for _ in range(LAYERS)]
                if place.torch_device.type == "cuda":
                    for rehearsed, tokens in itertools.product(MODES, (given, few)):
                        rehearse(rig, rehearsed, tokens)
                step(rig, "demand", few)
                copies.fail_at = fail_at
                if not verify:
                    assert wrong_outputs(rig, mode, given)
                    continue
                error = _error(rig, mode, given)
                assert isinstance(error, RequestRefused), f"{mode}, copy {fail_at}"
                expert, layer = _named(error)
                assert expert in routed(given)[layer]
                assert rig.slots.checks and rig.slots.checks.steps == 1 and rig.slots.verify() == []
                rig.residents()
                step(rig, mode, given)
                step(rig, "streamed", given)


def wrong_outputs(rig: Rig, mode: Mode, layers: Sequence[Routing]) -> bool:
    """Whether a step that goes through computes something else than it should."""
    tokens = torch.tensor([5], device=rig.place.torch_device)
    rig.slots.begin_step(mode)
    outs = [rig.slots(layer, *given) for layer, given in enumerate(layers)]
    rig.slots.collect(tokens)
    rig.slots.end_step()
    pairs = zip(outs, layers, strict=True)
    return any(not torch.equal(out, rig.expected(layer, *given)) for layer, (out, given) in enumerate(pairs))


def damaged_slots(place: Place) -> None:
    """A bit that turns in a slot is found where it is used, and by `verify`; after so many steps with one the pool is
    given up, and the worker is told why."""
    record = layout("float32", 16, 16)
    rng = random.Random(5)
    everything = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32, device=place.torch_device)
    with rig_on(place, geometry_of(record, 20, 3, 2), record, banks_of(record, torch.float32), verify=True) as rig:
        given = [routing(rng, place, EXPERTS, 3, 2, 16)._replace(experts=everything) for _ in range(LAYERS)]
        rehearse(rig, "decode", given)
        for turn in range(MOST_DAMAGED_STEPS):
            assert rig.released == []
            step(rig, "decode", given)
            owner = EXPERTS * (LAYERS - 1 - turn % LAYERS) + turn
            slot = rig.slots.tables.owner.tolist().index(owner)
            rig.slots.pool[slot, record.record_nbytes - 1 - turn] ^= 1 << turn
            assert rig.slots.verify() == [divmod(owner, EXPERTS)]
            error = _error(rig, "decode", given)
            assert isinstance(error, RequestRefused) and _named(error) == divmod(owner, EXPERTS)[::-1]
            assert rig.slots.verify() == [] and rig.slots.resident() == 0
        assert len(rig.released) == 1 and f"in {MOST_DAMAGED_STEPS} steps" in rig.released[0]
        assert isinstance(_error(rig, "decode", given), PeerDied)


def _named(error: RequestRefused) -> tuple[int, int]:
    """(expert, layer) of the error's text."""
    found = re.search(r"expert (\d+) of layer (\d+) is damaged in its slot", str(error))
    assert found, str(error)
    return int(found[1]), int(found[2])


def released(place: Place) -> None:
    """Nobody serves the ring: a release from another thread ends the step, and every one after it, with its reason."""
    record = layout("float32", 16, 16)
    modes: tuple[Mode, ...] = ("demand", "streamed")
    for mode in modes:
        rng = random.Random(3)
        rig = Rig(place, geometry_of(record, 9, 2, 2), record, banks_of(record, torch.float32))
        try:
            given = [routing(rng, place, EXPERTS, 5, 2, 16) for _ in range(LAYERS)]
            rehearse(rig, mode, given)
            timer = threading.Timer(0.3, rig.slots.release, ["the copy engine is gone"])
            timer.start()
            start = time.monotonic()
            assert isinstance(_error(rig, mode, given), PeerDied)
            assert time.monotonic() - start < 5
            assert isinstance(_error(rig, mode, given), PeerDied)
            assert rig.released == ["the copy engine is gone"]
            assert rig.residents() == set()
        finally:
            rig.close()


def silent(place: Place) -> None:
    """Nobody serves the ring and nobody notices: the deadline does."""
    record = layout("float32", 16, 16)
    rig = Rig(place, geometry_of(record, 9, 2, 2), record, banks_of(record, torch.float32), deadline_s=0.5)
    try:
        rng = random.Random(3)
        given = [routing(rng, place, EXPERTS, 5, 2, 16) for _ in range(LAYERS)]
        rehearse(rig, "demand", given)
        assert isinstance(_error(rig, "demand", given), PeerTimeout | PeerDied)
        assert len(rig.released) == 1 and "0.5 s" in rig.released[0]
    finally:
        rig.close()


def full_ring() -> None:
    """What a launch leaves that found the ring full: the step ends, and it is told once, for nothing is rung again."""
    record = layout("float32", 16, 16)
    place = hosted()
    rng = random.Random(3)
    with rig_on(place, geometry_of(record, 9, 2, 2), record, banks_of(record, torch.float32)) as rig:
        given = [routing(rng, place, EXPERTS, 5, 2, 16) for _ in range(LAYERS)]
        rehearse(rig, "demand", given)
        step(rig, "demand", given[:1])
        rig.slots.begin_step("demand")
        rig.slots._admission.control[admit.ERROR] = 1
        for layer, one in enumerate(given):
            rig.slots(layer, *one)
        try:
            rig.slots.collect(torch.zeros(1, dtype=torch.int64))
            raise AssertionError("a step without its experts was collected")
        except PeerDied:
            rig.slots.abort_step()
        assert len(rig.released) == 1 and "full ring" in rig.released[0]
        assert isinstance(_error(rig, "demand", given), PeerDied)


class BrokenDevice(HostedDevice):
    """Works until it is told to break; nothing does afterwards."""

    broken = False

    def write_words(self, address: int, value: int, count: int) -> None:
        if self.broken:
            raise CudaError("cuMemsetD32Async", "CUDA_ERROR_ILLEGAL_ADDRESS")
        super().write_words(address, value, count)


class BrokenStream(HostedStream):
    def __init__(self, device: BrokenDevice) -> None:
        self._device = device

    def mark(self) -> Callable[[], bool]:
        if self._device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().mark()


def broken() -> None:
    """The step in which the device breaks ends; it is told once, steps are refused, and nothing is freed."""
    record = layout("float32", 16, 16)
    place, device = hosted(), BrokenDevice()
    place.device, place.stream = device, BrokenStream(device)
    rng = random.Random(3)
    with rig_on(place, geometry_of(record, 9, 2, 2), record, banks_of(record, torch.float32)) as rig:
        given = [routing(rng, place, EXPERTS, 5, 2, 16) for _ in range(LAYERS)]
        step(rig, "demand", given)
        rig.slots.begin_step("demand")
        device.broken = True
        try:
            rig.slots(0, *given[0])
            raise AssertionError("it did not break")
        except RuntimeError:
            rig.slots.abort_step()
        assert len(rig.released) == 1 and "illegal memory access" in rig.released[0]
        assert isinstance(_error(rig, "demand", given), PeerDied)
        rig.slots.release("again")
        assert len(rig.released) == 1 and not rig.slots.close()
        device.broken = False
        rig.slots._watch.end()


def _error(rig: Rig, mode: Mode, given: Sequence[Routing]) -> SlotstreamError | None:
    try:
        step(rig, mode, given)
    except SlotstreamError as error:
        rig.slots.abort_step()
        return error
    return None


def main(histories: int, failing: Sequence[int]) -> None:
    """All that a CPU can do; the deadline is the device's, and on a CPU the wait itself has none."""
    random_histories(hosted(), range(histories))
    copies = FailingCopies(HostCopyDevice())
    failed_copies(copies, hosted(copies), failing)
    lying = LyingCopies(HostCopyDevice())
    damaged_copies(lying, hosted(lying), ((1, "decode"), (4, "streamed")))
    damaged_slots(hosted())
    released(hosted())
    broken()
    full_ring()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])
