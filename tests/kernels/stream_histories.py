"""Random streamed steps beside admissions, against plain lists and a reading of the ring.

Used by test_admit_stream.py on a GPU and, as a program, in the interpreter:
`python -m tests.kernels.stream_histories seed count`, with TRITON_INTERPRET=1 in the environment.
"""

import random
import sys
from collections.abc import Sequence

import torch

from copyengine.ring import CopyQuery, Limits, RingReader
from kernels import admit
from tests.kernels.admit_histories import Pair, Size

CAPACITY = 16


class Streaming:
    """A pool with stream slots behind it, and what each launch must leave of it."""

    def __init__(self, pair: Pair, group_slots: int, groups: int) -> None:
        self.pair, self.group_slots, self.groups = pair, group_slots, groups
        size = pair.size
        self.first_flag, self.first_slot = 40, size.slots + 3
        self.flags = torch.full((groups,), 1, dtype=torch.int32, device=pair.flags.device)
        self.stream = admit.new_device_stream(
            pair.state, pair.device, self.flags, self.first_flag, self.first_slot, group_slots, groups
        )
        limits = Limits(size.layers, size.experts, self.first_slot + groups * group_slots, self.first_flag + groups)
        pair.reader = RingReader(pair.memory.numpy(), limits)
        self.tables = [[-1] * size.experts for _ in range(groups)]
        self.stats = [[0, 0] for _ in range(size.layers)]
        self.number = 0

    def layer(self, layer: int, rng: random.Random) -> None:
        """All parts of a layer, some copies of which fail."""
        for part in range(self.stream.parts):
            self.part(layer, part, self.number % self.groups)
            self.number += 1
            if rng.random() < 0.1:
                self.flags[rng.randrange(self.groups)] = rng.choice([2, 3])

    def part(self, layer: int, part: int, turn: int) -> None:
        """One launch: the record, the flag, all tables, the counters and the word that tells of failures."""
        pair = self.pair
        failed = pair.device.control[admit.FAILED].item() == 1 or bool((self.flags > 1).any())
        before = {name: held.clone() for name, held in vars(pair.state).items() if isinstance(held, torch.Tensor)}
        expected = self.flags.tolist()
        record = self.expect(layer, part, turn)
        expected[turn] = 0 if record else 1
        admit.request_part(pair.state, pair.device, self.stream, layer, part, turn)
        if self.flags.is_cuda:
            torch.cuda.synchronize()
        assert pair.reader.poll() == record and pair.reader.poll() is None
        assert self.flags.tolist() == expected
        assert self.stream.tables.tolist() == self.tables
        assert self.stream.stats.tolist() == self.stats
        assert pair.device.control[admit.FAILED].item() == failed
        assert all(torch.equal(getattr(pair.state, name), held) for name, held in before.items())

    def expect(self, layer: int, part: int, turn: int) -> CopyQuery | None:
        """The record to come; enters table and counters."""
        resident = self.pair.reference.slot_of[layer].tolist()
        experts = range(self.pair.size.experts)[part * self.group_slots : (part + 1) * self.group_slots]
        base = self.first_slot + turn * self.group_slots - part * self.group_slots
        absent = [e for e in experts if resident[e] < 0]
        self.tables[turn] = [
            (base + e if e in absent else resident[e]) if e in experts else -1 for e in range(len(resident))
        ]
        tallies = self.stats[layer]
        self.stats[layer] = [tallies[0] + len(experts) - len(absent), tallies[1] + len(absent)]
        if not absent:
            return None
        return CopyQuery(self.first_flag + turn, "stream", layer, tuple(absent), tuple(base + e for e in absent))


def history(rng: random.Random, device: str, sizes: Sequence[Size]) -> None:
    """Demand and streamed layers in turn, through one ring: from an empty pool to one that is as full as it gets."""
    size = rng.choice(sizes)
    pair = Pair(size, device, first_record=rng.choice([0, 2**31 - 3, 2**32 - 2]))
    group_slots = rng.choice([1, 3, size.experts - 1, size.experts, size.experts + 2])
    streaming = Streaming(pair, max(1, min(group_slots, 128)), rng.randint(1, 3))
    for _ in range(4):
        streaming.layer(rng.randrange(size.layers), rng)
        layer, count = rng.randrange(size.layers), rng.choice([size.experts, rng.randint(0, size.experts)])
        pair.device.control[admit.FAILED] = pair.failed = 0
        pair.flags.fill_(1)
        pair.step(layer, sorted(rng.sample(range(size.experts), count)))


SMALL = [
    Size(layers, experts, slots, max_query, CAPACITY)
    for layers in (1, 2)
    for experts in (1, 5, 9)
    for slots in (1, 5, 9, 20)
    for max_query in (2, 128)
]
LARGE = [Size(2, 512, 2100, 128, CAPACITY), Size(2, 512, 300, 128, CAPACITY), Size(2, 129, 129, 128, CAPACITY)]


def run(seed: int, count: int, device: str, sizes: Sequence[Size] = SMALL) -> None:
    """`count` histories."""
    rng = random.Random(seed)
    for _ in range(count):
        history(rng, device, sizes)


def ring_stays_full(device: str) -> None:
    """A ring of two records that nobody reads: the third part's flag says so, and all parts' that follow."""
    pair = Pair(Size(1, 8, 8, 2, 2), device)
    streaming = Streaming(pair, 2, 3)
    for part in range(4):
        admit.request_part(pair.state, pair.device, streaming.stream, 0, part, part % 3)
    assert streaming.flags.tolist() == [2, 0, 2]
    assert pair.device.control[admit.ERROR].item() == 1
    first, second = pair.reader.poll(), pair.reader.poll()
    assert isinstance(first, CopyQuery) and first.experts == (0, 1)
    assert isinstance(second, CopyQuery) and second.experts == (2, 3)
    assert pair.reader.poll() is None


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), "cpu")
    ring_stays_full("cpu")
