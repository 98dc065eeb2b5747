"""Random histories of admission on the device, step by step against the reference and a reading of the ring.

Used by test_admit_triton.py (in the interpreter and on a GPU) and by tests/bench/bench_admit.py. As a program it runs
histories on the CPU: `python -m tests.kernels.admit_histories seed count`, with TRITON_INTERPRET=1 in the environment.
"""

import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from copyengine.ring import CELLS, SEQUENCE, CopyQuery, Limits, Malformed, RingReader, RingWriter, ring_nbytes
from kernels import admit
from kernels.admit.state import AdmissionState

FIRST_FLAG = 3


@dataclass(frozen=True)
class Size:
    """Sizes of one history: layers, experts, slots, longest query, records of the ring."""

    layers: int
    experts: int
    slots: int
    max_query: int
    capacity: int
    half_life: int = 0


class Pair:
    """The same pool twice: on the device through the kernel, on the CPU through the reference."""

    def __init__(self, size: Size, device: str, clock: int = 0, first_record: int = 0, spin_limit: int = 20) -> None:
        self.size = size
        self.reference = admit.new_state(size.layers, size.experts, size.slots, half_life=size.half_life)
        self.reference.clock.fill_(clock)
        self.state = to_device(self.reference, device)
        self.flags = torch.full((most_flags(size),), 7, dtype=torch.int32, device=device)
        self.memory = torch.zeros(ring_nbytes(size.capacity), dtype=torch.uint8)
        if device != "cpu":
            self.memory = self.memory.pin_memory()  # mapped: the device reads and writes it at the same address
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.memory.numpy()
        RingWriter(array, size.capacity, first_record)
        self.reader = RingReader(array, Limits(size.layers, size.experts, size.slots, FIRST_FLAG + most_flags(size)))
        self.device = admit.new_device_admission(
            self.state,
            self.flags,
            self.memory.data_ptr(),
            size.capacity,
            size.max_query,
            FIRST_FLAG,
            first_record,
            spin_limit,
        )
        self.expected_stats = [[0, 0, 0] for _ in range(size.layers)]
        self.routing = torch.zeros(size.layers, size.experts, dtype=torch.int64)
        self.failed = 1  # the flags' first values are none that a copy could have left

    def step(self, layer: int, experts: list[int], count_routing: bool = False) -> None:
        """Admit a layer on both and compare everything after each launch."""
        offsets = offsets_of(experts, self.size.experts).to(self.flags.device)
        wanted = torch.tensor(experts, dtype=torch.int64)
        cut = admit.cut(self.reference, layer, wanted, self.size.max_query)
        launches = admit.launches(self.size.experts, self.size.slots, self.size.max_query, self.size.experts)
        assert cut.at_once or len(cut.queries) <= launches
        for index in range(launches):
            admit.admit_layer(self.state, self.device, layer, offsets, index, count_routing)
            first, end = (0, len(cut.queries) if index == 0 else 0) if cut.at_once else (index, index + 1)
            records, flags, table = self.on_reference(
                layer, cut, wanted, first, min(end, len(cut.queries)), count_routing
            )
            if self.flags.is_cuda:
                torch.cuda.synchronize()
            read = []
            while (record := self.reader.poll()) is not None:
                read.append(record)
            assert read == records, (read, records)
            found = self.flags.tolist()
            assert all(found[i] == value for i, value in flags.items()), (found, flags)
            assert all(value == 1 for value in found[len(cut.queries) :]), found
            if index == 0 or flags:
                assert torch.equal(self.device.table.cpu(), table)
            self.check_tables()
        numbers = torch.full((self.size.experts,), -1, dtype=torch.int32)
        for number, query in enumerate(cut.queries):
            numbers[query] = number
        assert torch.equal(self.device.query_of.cpu(), numbers)
        self.check_spans(cut)
        self.routing[layer, wanted] += count_routing
        assert torch.equal(self.device.routing.cpu(), self.routing)
        assert self.device.stats.tolist() == self.expected_stats
        assert self.device.control[admit.ERROR].item() == 0
        assert self.device.control[admit.FAILED].item() == self.failed

    def fail(self, rng: random.Random) -> None:
        """Now and then a flag tells of a failed copy or a release, or the host has seen FAILED and cleared it."""
        if rng.random() < 0.2:
            self.flags[rng.randrange(len(self.flags))] = rng.choice([2, 3])
            self.failed = 1
        elif not (self.flags > 1).any() and rng.random() < 0.5:
            self.device.control[admit.FAILED] = self.failed = 0

    def check_spans(self, cut: admit.Cut) -> None:
        """Bounds that hold their query's experts and no other's; all experts if the layer does not fit."""
        spans = self.device.spans.tolist()
        routed = [e for query in cut.queries for e in query.tolist()]
        for query, (begin, end) in zip(cut.queries, spans, strict=False):
            within = [e for e in routed if begin <= e < end]
            assert within == query.tolist() if cut.at_once else (begin, end) == (0, self.size.experts)
        assert all(span == [0, 0] for span in spans[len(cut.queries) :]), spans

    def check_tables(self) -> None:
        """The tables are equal, whole."""
        expected = tables_of(self.reference)
        for name, ours in tables_of(self.state).items():
            assert torch.equal(ours.cpu(), expected[name]), (name, ours.tolist(), expected[name].tolist())

    def on_reference(
        self, layer: int, cut: admit.Cut, wanted: Tensor, first: int, end: int, counts: bool = False
    ) -> tuple[list[CopyQuery], dict[int, int], Tensor]:
        """Admit queries first..end-1; the records to come, the flags by query, and the table row."""
        records: list[CopyQuery] = []
        flags: dict[int, int] = {}
        table = torch.full((self.size.experts,), -1, dtype=torch.int32)
        for number in range(first, end):
            query = cut.queries[number]
            needed = wanted if cut.at_once else torch.cat(cut.queries[number:])
            slots, missing = admit.admit(self.reference, layer, query, needed, counts)
            table[query] = slots
            flags[number] = 0 if missing.any() else 1
            copied = tuple(query[missing].tolist())
            if copied:
                records.append(CopyQuery(FIRST_FLAG + number, "demand", layer, copied, tuple(slots[missing].tolist())))
            tally = (len(query) - len(copied), len(copied), 1)
            self.expected_stats[layer] = [a + b for a, b in zip(self.expected_stats[layer], tally, strict=True)]
        return records, flags, table


def to_device(state: AdmissionState, device: str) -> AdmissionState:
    """A copy of the tables."""
    tensors: dict[str, Any] = {name: tensor.clone().to(device) for name, tensor in tables_of(state).items()}
    return replace(state, **tensors)


def tables_of(state: AdmissionState) -> dict[str, Tensor]:
    """Its tensors by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def most_flags(size: Size) -> int:
    """Flags of a layer, and one that no query has."""
    return admit.most_queries(size.experts, size.slots, size.max_query) + 1


def offsets_of(experts: list[int], count: int, routes: int = 3) -> Tensor:
    """[E + 1] int32 of an alignment in which each of `experts` has `routes` routes."""
    counts = torch.zeros(count, dtype=torch.int32)
    counts[experts] = routes
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def history(rng: random.Random, device: str, sizes: Sequence[Size], steps: int) -> None:
    """One pool, at most `steps` layers' steps of random experts: some few, some all, some of a set that stays."""
    size = replace(rng.choice(sizes), half_life=rng.choice([0, 24, 768]))
    pair = Pair(size, device, clock=rng.choice([0, 0, 1000]), first_record=rng.choice([0, 5, 2**31 - 3, 2**32 - 2]))
    kept = rng.sample(range(size.experts), rng.randint(0, size.experts))
    for _ in range(rng.randint(1, steps)):
        layer = rng.randrange(size.layers)
        pool = rng.choice([list(range(size.experts)), kept])
        experts = sorted(rng.sample(pool, rng.randint(0, len(pool))))
        pair.fail(rng)
        pair.step(layer, experts, count_routing=rng.random() < 0.5)
        if experts and rng.random() < 0.2:
            lost = torch.tensor(rng.sample(experts, rng.randint(1, len(experts))))
            admit.invalidate(pair.reference, layer, lost)
            admit.invalidate(pair.state, layer, lost.to(pair.flags.device))


SMALL = [
    Size(layers, experts, slots, max_query, 16)
    for layers in (1, 2, 3)
    for experts in (1, 5, 9, 24)
    for slots in (1, 4, 9, 23, 24, 25, 50)
    for max_query in (1, 2, 3, 7, 128)
    if admit.most_queries(experts, slots, max_query) <= 6
]
LARGE = [
    Size(3, 64, 100, 7, 16),
    Size(3, 512, 1100, 32, 32),
    Size(5, 512, 2100, 128, 64),
    Size(2, 512, 300, 128, 4),
    Size(2, 512, 511, 128, 8),
    Size(50, 512, 24576, 128, 4),
    Size(2, 1024, 2100, 128, 8),
]
"""For a GPU: several warps, chunks and sizes of blocks; with 24,576 slots mostly free, and over-full with 300."""


def run(seed: int, count: int, device: str, sizes: Sequence[Size] = SMALL, steps: int = 4) -> None:
    """`count` histories."""
    rng = random.Random(seed)
    for _ in range(count):
        history(rng, device, sizes, steps)


def ring_stays_full(device: str) -> None:
    """A reader that takes nothing: after `spin_limit` looks the error is set, flags say so, and nothing is lost."""
    pair = Pair(Size(1, 8, 8, 2, 2), device)
    admit.admit_layer(pair.state, pair.device, 0, offsets_of(list(range(8)), 8).to(device))
    assert pair.flags.tolist() == [0, 0, 2, 2, 1]
    assert pair.device.control[admit.ERROR].item() == 1
    first, second = pair.reader.poll(), pair.reader.poll()
    assert isinstance(first, CopyQuery) and first.experts == (0, 1)
    assert isinstance(second, CopyQuery) and second.experts == (2, 3)
    assert pair.reader.poll() is None
    admit.invalidate(pair.state, 0, torch.arange(8, device=device))
    admit.admit_layer(pair.state, pair.device, 0, offsets_of([0], 8).to(device))
    assert pair.flags[0].item() == 2 and pair.reader.poll() is None  # the error stays


def rung(pair: Pair) -> bool:
    """Whether every cell of the ring has a record, which nobody has read."""
    words = pair.memory.view(torch.int32)[CELLS:].view(pair.size.capacity, -1)
    return bool((words[:, SEQUENCE] != 0).all())


def host_ends_the_spin(device: str) -> None:
    """A ring that nobody reads, and a word from the host: the launch ends at once, its flags say so."""
    pair = Pair(Size(1, 8, 8, 2, 2), device, spin_limit=1 << 30)
    stream = None if device == "cpu" else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def give_up() -> None:
        end_s = time.monotonic() + 30
        while not rung(pair) and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(0.1)  # it spins now
        with torch.cuda.stream(stream):
            pair.device.control[admit.ERROR].fill_(9)

    offsets = offsets_of(list(range(8)), 8).to(device)
    # What is launched for the first time while a kernel spins would wait for it.
    admit.admit_layer(pair.state, pair.device, 0, offsets_of([], 8).to(device))
    pair.device.control[admit.ERROR].fill_(0)
    thread = threading.Thread(target=give_up)
    thread.start()
    admit.admit_layer(pair.state, pair.device, 0, offsets)
    thread.join()
    assert pair.flags.tolist() == [0, 0, 2, 2, 1]
    assert pair.device.control[admit.ERROR].item() == 9


def reader_in_a_thread(device: str) -> None:
    """16 queries through a ring of two records: the kernel waits for the reader, who wakes up late."""
    pair = Pair(Size(1, 512, 512, 32, 2), device, spin_limit=1 << 22)
    admit.admit_layer(pair.state, pair.device, 0, offsets_of([], 512).to(device))  # compiled before the clock runs
    read: list[CopyQuery | Malformed] = []

    def take_all() -> None:
        deadline = time.monotonic() + 20
        while len(read) < 16 and time.monotonic() < deadline:
            time.sleep(1e-3)
            if (record := pair.reader.poll()) is not None:
                read.append(record)

    thread = threading.Thread(target=take_all)
    thread.start()
    admit.admit_layer(pair.state, pair.device, 0, offsets_of(list(range(512)), 512).to(device))
    torch.cuda.synchronize()
    thread.join()
    ranges = [tuple(range(i, i + 32)) for i in range(0, 512, 32)]
    assert read == [CopyQuery(FIRST_FLAG + i, "demand", 0, r, r) for i, r in enumerate(ranges)]
    assert pair.device.control[admit.ERROR].item() == 0


def graph_replays(count: int) -> None:
    """A captured launch, replayed with other experts each time."""
    size = Size(2, 64, 40, 8, 32)
    warm = Pair(size, "cuda")
    offsets = offsets_of([], 64).cuda()
    admit.admit_layer(warm.state, warm.device, 0, offsets)  # compiled before the capture
    pair = Pair(size, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        admit.admit_layer(pair.state, pair.device, 1, offsets)
    rng = random.Random(0)
    for _ in range(count):
        experts = sorted(rng.sample(range(64), rng.randint(0, 40)))
        offsets.copy_(offsets_of(experts, 64))
        graph.replay()
        torch.cuda.synchronize()
        wanted = torch.tensor(experts, dtype=torch.int64)
        cut = admit.cut(pair.reference, 1, wanted, size.max_query)
        records, flags, table = pair.on_reference(1, cut, wanted, 0, len(cut.queries))
        assert [pair.reader.poll() for _ in records] == records and pair.reader.poll() is None
        assert pair.flags.tolist()[: len(flags)] == list(flags.values())
        assert torch.equal(pair.device.table.cpu(), table)
        pair.check_tables()


def saturated_ages(device: str) -> None:
    """A clock past 2^31: free slots go before used ones, however old, and younger ones stay in order."""
    pair = Pair(Size(2, 6, 6, 128, 4), device, clock=0)
    for layer, experts in ((0, [0, 1]), (1, [3]), (0, [2])):
        pair.step(layer, experts)
    for state in (pair.state, pair.reference):
        state.clock.fill_(2**33)
    for layer, experts in ((0, [5]), (1, [0]), (1, [1]), (0, [3, 4]), (1, [5])):
        pair.step(layer, experts)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), "cpu")
    from kernels.admit import tri

    tri.CHUNK = 32  # so that 50 slots take two
    run(int(sys.argv[1]) + 1, int(sys.argv[2]), "cpu")
    ring_stays_full("cpu")
    host_ends_the_spin("cpu")
    saturated_ages("cpu")
