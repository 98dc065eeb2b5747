"""The oracle against an exhaustive search over all that slots could hold; what any policy hits is never more."""

import itertools
import random

import numpy as np
import pytest

from worker.oracle import oracle_hits

Step = tuple[bool, list[set[int]]]
"""Whether it counts, and the experts of each layer."""


def best(resident: set[int], steps: list[Step], slots: int, experts: int) -> int:
    """Every set of at most S experts, those of the layer's step among them, that could be held after each layer."""
    events = [({layer * experts + e for e in row}, counts) for counts, step in steps for layer, row in enumerate(step)]
    hits_of: dict[frozenset[int], int] = {frozenset(resident): 0}
    for wanted, counts in events:
        after: dict[frozenset[int], int] = {}
        for held, hits in hits_of.items():
            hits += len(wanted & held) if counts else 0
            others = held - wanted
            room = min(slots - len(wanted), len(others))
            for kept in itertools.combinations(sorted(others), room):
                state = wanted.union(kept)
                after[frozenset(state)] = max(hits, after.get(frozenset(state), 0))
        hits_of = after
    return max(hits_of.values())


def arrays(
    resident: set[int], steps: list[Step], layers: int, experts: int
) -> tuple[np.ndarray, np.ndarray, list[bool]]:
    there = np.zeros(layers * experts, bool)
    there[sorted(resident)] = True
    routed = np.zeros((len(steps), layers, experts), bool)
    for n, (_, rows) in enumerate(steps):
        for layer, row in enumerate(rows):
            routed[n, layer, sorted(row)] = True
    return there.reshape(layers, experts), routed, [counts for counts, _ in steps]


@pytest.mark.parametrize("seed", range(3))
def test_it_hits_what_the_best_of_all_choices_hits(seed: int) -> None:
    """100 traces of one or two layers, demand steps among them, from pools that hold something at first."""
    rng = random.Random(seed)
    better = 0
    for _ in range(100):
        layers, experts = rng.randint(1, 2), rng.randint(1, 5)
        slots = rng.randint(1, layers * experts)
        most = min(experts, slots)
        steps = [
            (rng.random() < 0.75, [set(rng.sample(range(experts), rng.randint(0, most))) for _ in range(layers)])
            for _ in range(rng.randint(0, 7))
        ]
        resident = set(rng.sample(range(layers * experts), rng.randint(0, slots)))
        expected = best(resident, steps, slots, experts)
        assert oracle_hits(*arrays(resident, steps, layers, experts), slots) == expected
        better += expected > 0
    assert better > 30


def test_by_hand() -> None:
    """Round and round over three experts in two slots: the least recently used never hits, the best now and then."""
    steps: list[Step] = [(True, [{n % 3}]) for n in range(9)]
    assert oracle_hits(*arrays(set(), steps, 1, 3), 2) == 3
    assert oracle_hits(*arrays({0, 1}, steps, 1, 3), 2) == 5
    assert oracle_hits(*arrays(set(), steps, 1, 3), 3) == 6
    assert oracle_hits(*arrays(set(), [(False, [{0, 1}]), *steps], 1, 3), 3) == 8


def test_a_layer_of_more_experts_than_slots() -> None:
    """At most all slots hit; what is held over it is one less."""
    steps: list[Step] = [(True, [{0, 1, 2}, set()]), (True, [{0, 1, 2}, {0}])]
    assert oracle_hits(*arrays({3}, steps, 2, 3), 2) == 2 + 1 - 1


def test_nothing_logged() -> None:
    assert oracle_hits(*arrays(set(), [], 1, 3), 2) == 0
