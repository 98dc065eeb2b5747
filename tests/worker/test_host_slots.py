"""The slot pool with a real copier thread over shared memory.

Checked against the bank itself: whatever `groups` yields must hold, byte for byte, the record of its expert. Counters
are checked by hand or against the set of residents before the step.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from copyengine.checksums import bank_sums
from copyengine.copier import Attachment, Copier
from copyengine.device import LANDED, Bank, Memory, Run, Stream
from copyengine.device.host import HostCopyDevice, HostWorkerDevice, attach_segment
from copyengine.ring import CopyQuery, Limits, RingReader
from copyengine.wire.errors import CopyFailed, PeerDied, PeerTimeout, RequestRefused
from tests.copyengine.array_bank import ArrayBank
from worker.copy_checks import MOST_DAMAGED_STEPS, CopyChecks
from worker.expert_stats import MODES, layer_traffic
from worker.geometry import SlotGeometry
from worker.host_slots import ExpertSlots, Group
from worker.protocol import ExpertStats, Mode

RECORD = 256


class Rig:
    """Banks of random bytes, a copier, and the slots of one worker."""

    def __init__(
        self,
        geometry: SlotGeometry,
        device: HostCopyDevice | None = None,
        deadline_s: float = 20.0,
        verify: bool = False,
        on_release: Callable[[str], None] = lambda _: None,
    ) -> None:
        rng = np.random.default_rng(geometry.slots)
        nbytes = geometry.experts * geometry.record_nbytes
        self.banks = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(geometry.layers)]
        self.copier = Copier(device or HostCopyDevice(), background_depth=2, spin_us=500, on_death=lambda: None)
        self.wakes = 0
        self.traffic = {mode: np.zeros((geometry.layers, 2), np.int64) for mode in MODES}  # of whole steps, as expected
        records = [bank.reshape(geometry.experts, -1) for bank in self.banks]
        checks = CopyChecks(bank_sums(records, lambda _: None), geometry.record_nbytes) if verify else None
        arguments = geometry, self._wake, deadline_s, on_release
        self.slots = ExpertSlots(HostWorkerDevice(), "test", "w", *arguments, checks=checks)
        self.copier.start()

    def _wake(self) -> None:
        self.wakes += 1
        self.copier.wake()

    def attach(self) -> None:
        request, geometry = self.slots.attach_request, self.slots.geometry
        ring = attach_segment(request.ring)
        limits = Limits(geometry.layers, geometry.experts, request.pool_slots, request.flags.nbytes // 4)
        attachment = Attachment(
            request.worker,
            [ArrayBank(bank) for bank in self.banks],
            geometry.record_nbytes,
            attach_segment(request.pool),
            attach_segment(request.flags),
            ring,
            RingReader(ring.array, limits),
        )
        self.copier.attach(attachment).result(10)

    def check(self, layer: int, group: Group) -> None:
        """Each slot of the group holds its expert's record."""
        records = self.banks[layer].reshape(self.slots.geometry.experts, -1)
        assert np.array_equal(self.slots.pool_bytes[group.slots], records[group.experts])

    def layer(self, layer: int, experts: list[int]) -> list[Group]:
        groups = []
        for group in self.slots.groups(layer, experts):
            self.check(layer, group)
            assert group.experts == sorted(group.experts)
            groups.append(group)
        assert sorted(e for group in groups for e in group.experts) == experts
        return groups

    def step(self, mode: Mode, routed: list[list[int]]) -> ExpertStats:
        self.slots.begin_step(mode)
        for layer, experts in enumerate(routed):
            wanted = list(range(self.slots.geometry.experts)) if mode == "streamed" else experts
            hits = sum(self.slots._state.slot_of[layer].tolist()[expert] >= 0 for expert in wanted)
            self.layer(layer, experts)
            self.traffic[mode][layer] += (hits, len(wanted) - hits)
        return self.slots.end_step()

    def residents(self) -> set[tuple[int, int]]:
        """(layer, expert) of all cache slots; each must really be there."""
        held = set()
        for slot, owner in enumerate(self.slots._state.owner.tolist()):
            if owner >= 0:
                layer, expert = divmod(owner, self.slots.geometry.experts)
                self.check(layer, Group([expert], [slot]))
                held.add((layer, expert))
        return held

    def close(self) -> None:
        self.copier.stop()
        self.slots.close()


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(geometry: SlotGeometry, attach: bool = True, **more: object) -> Rig:
        rigs.append(Rig(geometry, **more))  # type: ignore[arg-type]
        if attach:
            rigs[-1].attach()
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def untimed(stats: ExpertStats) -> ExpertStats:
    return replace(stats, copy_wait_s=0.0)


def random_routing(rng: random.Random, geometry: SlotGeometry) -> list[list[int]]:
    return [
        sorted(rng.sample(range(geometry.experts), rng.randint(0, geometry.experts))) for _ in range(geometry.layers)
    ]


@pytest.mark.parametrize("max_query", [3, 128])
@pytest.mark.parametrize(("experts", "slots"), [(1, 1), (8, 1), (8, 5), (8, 24), (40, 7), (40, 200), (130, 128)])
def test_random_steps_of_all_modes(make_rig: MakeRig, experts: int, slots: int, max_query: int) -> None:
    """Bytes against the bank, counters against the residents before the step and, by layer, before the layer; the pool
    may be less than a layer."""
    geometry = SlotGeometry(3, experts, RECORD, slots, max_query=max_query)
    rig = make_rig(geometry)
    rng = random.Random(experts * 1000 + slots)
    for mode in rng.choices(MODES, k=12):
        before, routed = rig.residents(), random_routing(rng, geometry)
        start_s = time.monotonic()
        stats = rig.step(mode, routed)
        assert bool(stats.misses) == (0 < stats.copy_wait_s <= time.monotonic() - start_s)
        assert stats.hits + stats.misses == stats.lookups and stats.copied_nbytes == stats.misses * RECORD
        if mode == "streamed":
            assert rig.residents() == before
            assert (stats.lookups, stats.hits) == (3 * experts, len(before))
        else:
            assert stats.lookups == sum(map(len, routed))
            if len(routed[0]) <= slots:
                first = sum(layer == 0 and expert in routed[0] for layer, expert in before)
                assert stats.hits >= first
        assert rig.slots.resident() == len(rig.residents()) <= slots
        assert {tuple(pair) for pair in np.argwhere(rig.slots.residency()).tolist()} == rig.residents()
    by_layer = {mode: layer_traffic(traffic) for mode, traffic in rig.traffic.items()}
    assert rig.slots.layer_stats() == by_layer
    totals = rig.slots.stats()
    for mode in MODES:
        assert (totals[mode].hits, totals[mode].misses) == tuple(rig.traffic[mode].sum(0))
    copied = rig.copier.stats().counters
    assert copied["demand"].nbytes == totals["decode"].copied_nbytes + totals["demand"].copied_nbytes
    assert copied["stream"].nbytes == totals["streamed"].copied_nbytes


def test_demand_twice_fetches_once(make_rig: MakeRig) -> None:
    """A layer that fits is fetched by its first step and hit by its second; counts by hand."""
    rig = make_rig(SlotGeometry(2, 10, RECORD, 20))
    routed = [[0, 3, 9], [1, 2]]
    assert untimed(rig.step("demand", routed)) == ExpertStats(1, 5, 0, 5, 5 * RECORD)
    assert rig.step("decode", routed) == ExpertStats(1, 5, 5, 0, 0)
    assert rig.residents() == {(0, 0), (0, 3), (0, 9), (1, 1), (1, 2)}


def test_what_is_forgotten_is_fetched_again(make_rig: MakeRig) -> None:
    """As from an empty pool, into the same slots; what was counted stays."""
    rig = make_rig(SlotGeometry(2, 10, RECORD, 20))
    routed = [[0, 3, 9], [1, 2]]
    rig.step("demand", routed)
    slots = rig.slots._state.owner.tolist()
    rig.slots.forget()
    assert rig.slots.resident() == 0 and rig.residents() == set() and not rig.slots.residency().any()
    assert untimed(rig.step("demand", routed)) == ExpertStats(1, 5, 0, 5, 5 * RECORD)
    assert rig.slots._state.owner.tolist() == slots and rig.slots.stats()["demand"].misses == 10


def test_only_decode_steps_count_as_routing(make_rig: MakeRig) -> None:
    rig = make_rig(SlotGeometry(2, 4, RECORD, 8))
    for mode in (*MODES, MODES[0]):
        rig.step(mode, [[1, 2], [3]])
    assert rig.slots.decode_routing.tolist() == [[0, 2, 2, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize("resident", [0, 5, 10])
@pytest.mark.parametrize("stream_groups", [1, 2, 3])
def test_streaming_with_nothing_some_and_everything_resident(
    make_rig: MakeRig, resident: int, stream_groups: int
) -> None:
    """Copied bytes: exactly what is not resident. The resident experts come first, all others pass by in order."""
    geometry = SlotGeometry(3, 10, RECORD, 30, stream_groups=stream_groups, max_query=4)
    rig = make_rig(geometry)
    if resident:
        rig.step("demand", [list(range(resident))] * 3)
    rig.slots.begin_step("streamed")
    for layer in range(3):
        groups = rig.layer(layer, [0, 2, 4, 6, 8])
        cached = [group for group in groups if group.slots[0] < geometry.slots]
        assert len(cached) == (1 if resident else 0) and groups[: len(cached)] == cached
    stats = untimed(rig.slots.end_step())
    assert stats == ExpertStats(1, 30, 3 * resident, 3 * (10 - resident), 3 * (10 - resident) * RECORD)


def test_demand_pool_smaller_than_the_layer_fetches_each_expert_once(make_rig: MakeRig) -> None:
    """Two experts are resident, twelve are wanted, three slots: two hits, ten fetches."""
    rig = make_rig(SlotGeometry(1, 12, RECORD, 3, max_query=2))
    rig.step("demand", [[5, 9]])
    assert untimed(rig.step("demand", [list(range(12))])) == ExpertStats(1, 12, 2, 10, 10 * RECORD)


def test_steps_under_inference_mode(make_rig: MakeRig) -> None:
    """Admission's tensors are changed inside and outside of it."""
    rig = make_rig(SlotGeometry(2, 6, RECORD, 4))
    with torch.inference_mode():
        rig.step("demand", [[0, 1, 2], [3, 4]])
    rig.step("decode", [[0, 5], [3, 5]])


def test_a_step_that_pauses_longer_than_the_spin_loses_no_query(make_rig: MakeRig) -> None:
    """The copier's spin is 0.5 ms; the worker pauses 20 ms between two layers, and between two steps."""
    rig = make_rig(SlotGeometry(4, 6, RECORD, 3, max_query=2), deadline_s=5)
    for mode in MODES:
        time.sleep(0.02)
        rig.slots.begin_step(mode)
        for layer in range(4):
            time.sleep(0.02)
            rig.layer(layer, [0, 2, 3, 5])
        rig.slots.end_step()
    assert 1 <= rig.wakes <= 3


def test_many_steps_at_the_edge_of_sleep_lose_no_wake(make_rig: MakeRig) -> None:
    """Pauses around the spin time, so that steps begin just as the copier goes to sleep."""
    rig = make_rig(SlotGeometry(1, 6, RECORD, 1), deadline_s=5)
    rng = random.Random(1)
    for i in range(250):
        time.sleep(rng.uniform(0.0003, 0.0009))
        rig.step("decode", [[i % 6]])
    assert rig.wakes > 0


class FailingDevice(HostCopyDevice):
    """Fails the copies that a test names, or holds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[int], bool] = lambda _: False
        self.gate = threading.Event()
        self.gate.set()
        self.copies = 0

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        for run in runs:
            self.gate.wait(10)
            self.copies += 1
            if self.fails(self.copies):
                raise CopyFailed("told to")
            super().copy(stream, source, target, [run])


@pytest.mark.parametrize("mode", ["demand", "streamed", "decode"])
def test_a_failed_copy_ends_the_step_and_leaves_only_true_residents(make_rig: MakeRig, mode: Mode) -> None:
    """Any copy of a step fails in turn; afterwards each resident's bytes are the bank's, and the next step works."""
    device = FailingDevice()
    rig = make_rig(SlotGeometry(2, 9, RECORD, 7, max_query=2), device=device)
    routed = [[0, 2, 4, 6, 8], [1, 2, 3, 4, 5, 6, 7, 8]]
    for failing in range(1, 12):
        device.copies = 0
        device.fails = lambda copy, failing=failing: copy == failing  # type: ignore[misc]
        try:
            rig.step(mode, routed)
        except CopyFailed:
            rig.slots.abort_step()
            rig.slots.abort_step()  # twice is as good as once
        rig.residents()
        device.fails = lambda _: False
        rig.step(mode, routed)
        rig.residents()
    stats = rig.slots.stats()[mode]
    assert stats.hits + stats.misses == stats.lookups and 11 <= stats.steps < 22
    assert sum(c.failed_queries for c in rig.copier.stats().counters.values()) > 0


class LyingDevice(HostCopyDevice):
    """Of whose copies the one numbered `lie`, from 1 on, is not made, and nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.lie = 0

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        self.copies += 1
        if self.copies != self.lie:
            super().copy(stream, source, target, runs)


def tell_a_lie(device: LyingDevice, number: int) -> None:
    device.copies, device.lie = 0, number


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_that_was_not_made_ends_the_step_that_would_compute_with_it(make_rig: MakeRig, mode: Mode) -> None:
    """With --verify-copies, any copy of a step in turn: every group that is given out holds the bank's bytes (`layer`
    looks), the error names one of those routed to, and none that is damaged stays resident. The third such step
    is the last."""
    found = 0
    for number in range(1, 12):
        device, why = LyingDevice(), list[str]()
        rig = make_rig(SlotGeometry(2, 9, RECORD, 7, max_query=2), device=device, verify=True, on_release=why.append)
        routed = [[0, 2, 4, 6, 8], [1, 2, 3, 4, 5, 6, 7, 8]]
        for turn in range(MOST_DAMAGED_STEPS):
            rig.step("demand", [[1], [turn]])
            tell_a_lie(device, number)
            try:
                rig.step(mode, routed)
            except RequestRefused as error:
                rig.slots.abort_step()
                found += 1
                expert, layer = map(int, re.findall(r"expert (\d+) of layer (\d+)", str(error))[0])
                assert expert in routed[layer]
                assert rig.slots.verify() == [] and rig.slots.checks and rig.slots.checks.steps == turn + 1
            rig.residents()
            tell_a_lie(device, 0)
            assert rig.slots.checks and bool(why) == (rig.slots.checks.steps == MOST_DAMAGED_STEPS)
            if why:
                with pytest.raises(PeerDied, match=f"damaged experts in {MOST_DAMAGED_STEPS} steps"):
                    rig.step(mode, routed)
                assert turn == MOST_DAMAGED_STEPS - 1
            else:
                rig.step(mode, routed)
                rig.residents()
    assert found > 11


def test_without_the_mode_a_copy_that_was_not_made_is_computed_with(make_rig: MakeRig) -> None:
    """What the test before this one would not see if nothing were damaged."""
    device = LyingDevice()
    rig = make_rig(SlotGeometry(2, 9, RECORD, 18), device=device)
    tell_a_lie(device, 1)
    with pytest.raises(AssertionError):
        rig.step("decode", [[0, 1], [2]])


def test_bytes_that_change_in_a_slot_are_found_before_they_are_used(make_rig: MakeRig) -> None:
    """With --verify-copies, of an expert that was resident and sound; and by `verify`, which changes nothing."""
    rig = make_rig(SlotGeometry(2, 9, RECORD, 18), verify=True)
    rig.step("decode", [[0, 1], [2, 5]])
    assert rig.slots.verify() == []
    rig.slots.pool_bytes[rig.slots._state.slot_of[1, 5], 77] ^= 4
    assert rig.slots.verify() == [(1, 5)] == rig.slots.verify()
    rig.step("decode", [[0, 1], [2]])
    with pytest.raises(RequestRefused, match=r"^copy_damaged: expert 5 of layer 1 is damaged in its slot$"):
        rig.step("decode", [[0], [5]])
    rig.slots.abort_step()
    assert rig.residents() == {(0, 0), (0, 1), (1, 2)}
    rig.step("decode", [[0], [5]])


@pytest.mark.parametrize("mode", ["demand", "streamed"])
@pytest.mark.parametrize("how", ["abort", "end", "go on"])
def test_a_consumer_that_stops_early_leaves_no_late_copy(make_rig: MakeRig, mode: Mode, how: str) -> None:
    """The copies are held up while the step is left; whatever counts as resident later holds its record."""
    device = FailingDevice()
    rig = make_rig(SlotGeometry(3, 12, RECORD, 12, max_query=3), device=device)
    for _ in range(3):
        rig.slots.begin_step(mode)
        for group in rig.slots.groups(0, list(range(0, 12, 2))):
            rig.check(0, group)
            device.gate.clear()
            threading.Timer(0.05, device.gate.set).start()
            break
        if how == "go on":
            rig.layer(2, [0, 1, 5, 6, 11])
        if how == "abort":
            rig.slots.abort_step()
        else:
            rig.slots.end_step()
        device.gate.wait()
        rig.residents()
        rig.step("demand", [[1, 3], list(range(12)), [7]])
        rig.step("streamed", [[1, 3, 4], list(range(12)), [7]])


def test_a_dead_copier_times_out_and_stays_dead(make_rig: MakeRig) -> None:
    """Nobody serves the ring: PeerTimeout after the deadline, then PeerDied at once, and nothing counts as resident."""
    rig = make_rig(SlotGeometry(1, 4, RECORD, 4), attach=False, deadline_s=0.2)
    rig.slots.begin_step("demand")
    with pytest.raises(PeerTimeout, match=r"0\.2 s"):
        list(rig.slots.groups(0, [0, 1]))
    rig.slots.abort_step()
    assert rig.slots.resident() == 0
    with pytest.raises(PeerDied):
        rig.slots.begin_step("demand")


@pytest.mark.parametrize("mode", ["demand", "streamed"])
def test_release_ends_a_wait(make_rig: MakeRig, mode: Mode) -> None:
    """Another thread releases while the step waits without hope; it ends far before its deadline."""
    rig = make_rig(SlotGeometry(1, 4, RECORD, 4), attach=False, deadline_s=60)
    threading.Timer(0.1, rig.slots.release, ["the copy engine is gone"]).start()
    with pytest.raises(PeerDied, match="the copy engine is gone"):
        rig.step(mode, [[0, 1]])
    rig.slots.abort_step()
    assert rig.slots.resident() == 0
    with pytest.raises(PeerDied, match="the copy engine is gone"):
        rig.slots.begin_step(mode)


def test_release_ends_the_wait_for_a_full_ring(make_rig: MakeRig) -> None:
    """65 queries of one expert, 64 places, no reader."""
    rig = make_rig(SlotGeometry(1, 70, RECORD, 70, max_query=1), attach=False, deadline_s=60)
    threading.Timer(0.1, rig.slots.release, ["gone"]).start()
    with pytest.raises(PeerDied, match="gone"):
        rig.step("demand", [list(range(70))])
    rig.slots.abort_step()
    assert rig.slots.resident() == 0


def test_a_detached_worker_is_told(make_rig: MakeRig) -> None:
    """The copy engine drops this worker's queries, read or not, while it waits: CopyFailed long before the deadline."""
    device = FailingDevice()
    rig = make_rig(SlotGeometry(1, 8, RECORD, 8, stream_groups=4, max_query=2), device=device, deadline_s=60)
    device.gate.clear()
    rig.slots.begin_step("streamed")
    detached = rig.copier.detach("w")
    device.gate.set()
    detached.result(10)
    start = time.monotonic()
    with pytest.raises(CopyFailed):
        rig.layer(0, list(range(8)))
    rig.slots.abort_step()
    assert time.monotonic() - start < 30


# The order of requests and waits: no copier thread, the ring is read by hand ---------------------------------------


class Hand:
    """A copy engine that does nothing by itself. What is rung is in `seen`, from `read` on."""

    def __init__(self, geometry: SlotGeometry, deadline_s: float = 10) -> None:
        self.released: list[str] = []
        self.slots = ExpertSlots(
            HostWorkerDevice(), "test", "w", geometry, lambda: None, deadline_s, self.released.append
        )
        request = self.slots.attach_request
        self.device = HostCopyDevice()
        self.memory = [attach_segment(handle) for handle in (request.ring, request.flags, request.pool)]
        limits = Limits(geometry.layers, geometry.experts, request.pool_slots, request.flags.nbytes // 4)
        self.reader = RingReader(self.memory[0].array, limits)
        self.waits: list[tuple[int, int]] = []  # flag, and queries rung by then
        self.rung = 0
        mailbox = self.slots._mailbox
        ring, wait = mailbox.ring, mailbox.wait

        def counted_ring(query: CopyQuery) -> None:
            self.rung += 1
            ring(query)

        def noted_wait(flag: int) -> None:
            self.waits.append((flag, self.rung))
            wait(flag)

        mailbox.ring, mailbox.wait = counted_ring, noted_wait  # type: ignore[method-assign]

    def read(self) -> list[CopyQuery]:
        """What was rung since the last call."""
        found = []
        while (record := self.reader.poll()) is not None:
            assert isinstance(record, CopyQuery)
            found.append(record)
        return found

    def land(self, query: CopyQuery) -> None:
        self.device.write_flag("demand", self.memory[1], query.flag, LANDED)

    def close(self) -> None:
        for memory in self.memory:
            memory.close()
        self.slots.close()


@pytest.fixture
def make_hand() -> Iterator[Callable[..., Hand]]:
    hands: list[Hand] = []

    def make(geometry: SlotGeometry, **more: float) -> Hand:
        hands.append(Hand(geometry, **more))
        return hands[-1]

    yield make
    for hand in hands:
        hand.close()


def test_a_streamed_step_requests_groups_ahead_of_the_layer_that_computes(make_hand: Callable[..., Hand]) -> None:
    """Five experts of two layers in groups of two, four at a time: groups 0, 1, 2 are layer 0's, 3, 4, 5 layer 1's.

    When the step begins four are in the ring, one of layer 1 among them. While the consumer computes on one group the
    next can land, and the request that follows a finished group is in the ring before the next group is waited for.
    """
    hand = make_hand(SlotGeometry(2, 5, RECORD, 5, stream_groups=4, max_query=2))
    hand.slots.begin_step("streamed")
    queries = hand.read()
    assert [(q.layer, q.experts) for q in queries] == [(0, (0, 1)), (0, (2, 3)), (0, (4,)), (1, (0, 1))]
    assert hand.waits == []
    hand.land(queries[0])
    groups = hand.slots.groups(0, [0, 1, 2, 3, 4])
    assert next(groups).experts == [0, 1]
    assert hand.read() == []  # the group's slots are in use
    hand.land(queries[1])  # while it is computed on
    assert next(groups).experts == [2, 3]
    queries += hand.read()
    assert (queries[4].layer, queries[4].experts, queries[4].slots) == (1, (2, 3), queries[0].slots)
    hand.land(queries[2])
    assert next(groups).experts == [4]
    queries += hand.read()
    assert len(queries) == 6 and next(groups, None) is None
    for query in queries[3:]:
        hand.land(query)
    assert [group.experts for group in hand.slots.groups(1, [0, 2, 4])] == [[0], [2], [4]]
    hand.slots.end_step()
    assert [rung for _, rung in hand.waits] == [4, 5, 6, 6, 6, 6]


@pytest.mark.parametrize("mode", ["demand", "decode"])
def test_all_queries_of_a_demand_layer_are_rung_before_the_first_is_waited_for(
    make_hand: Callable[..., Hand], mode: Mode
) -> None:
    """Three queries; none has landed when the third is in the ring. The groups come as their own queries land."""
    hand = make_hand(SlotGeometry(1, 8, RECORD, 8, max_query=3))
    hand.slots.begin_step(mode)
    seen: list[list[int]] = []

    def consume() -> None:
        seen.extend(group.experts for group in hand.slots.groups(0, list(range(8))))

    thread = threading.Thread(target=consume)
    thread.start()
    queries: list[CopyQuery] = []
    while len(queries) < 3 and thread.is_alive():
        queries += hand.read()
    assert [q.experts for q in queries] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert seen == []
    for count, query in enumerate(queries, start=1):
        hand.land(query)
        while len(seen) < count and thread.is_alive():
            time.sleep(0.001)
        assert len(seen) == count
    thread.join(10)
    assert hand.waits == [(0, 3), (1, 3), (2, 3)]
    hand.slots.end_step()


def test_a_time_out_and_a_release_tell_why_once(make_hand: Callable[..., Hand]) -> None:
    hand = make_hand(SlotGeometry(1, 4, RECORD, 4), deadline_s=0.05)
    hand.slots.begin_step("demand")
    with pytest.raises(PeerTimeout):
        list(hand.slots.groups(0, [1]))
    hand.slots.abort_step()
    hand.slots.release("the copy engine is gone")
    assert len(hand.released) == 1 and "0.05 s" in hand.released[0]
