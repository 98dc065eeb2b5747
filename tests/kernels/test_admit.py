"""Admission against a brute-force model in plain lists and dicts, written from the rules and not from the code."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.admit import AdmissionState, admit, cut, invalidate, new_state


class Model:
    """A pool as a list of owners and a list of stamps."""

    def __init__(self, slots: int) -> None:
        self.owner: list[tuple[int, int] | None] = [None] * slots
        self.stamp = [0] * slots
        self.now = 0

    def where(self, layer: int, expert: int) -> int | None:
        return self.owner.index((layer, expert)) if (layer, expert) in self.owner else None

    def cut(self, layer: int, experts: list[int], max_query: int) -> tuple[list[list[int]], bool]:
        if len(experts) <= len(self.owner):
            return [experts[i : i + max_query] for i in range(0, len(experts), max_query)], True
        here = [e for e in experts if self.where(layer, e) is not None]
        away = [e for e in experts if self.where(layer, e) is None]
        n = min(max_query, len(self.owner))
        return [part[i : i + n] for part in (here, away) for i in range(0, len(part), n)], False

    def admit(self, layer: int, query: list[int], needed: list[int]) -> tuple[list[int], list[bool]]:
        self.now += 1
        missing = [self.where(layer, e) is None for e in query]
        for slot in (self.where(layer, expert) for expert in query):
            if slot is not None:
                self.stamp[slot] = self.now
        victims: list[int] = []
        for _ in range(sum(missing)):  # one after the other: the first free slot, else the oldest, lowest slot first
            best = None
            for slot, owner in enumerate(self.owner):
                if slot in victims or (owner is not None and owner[0] == layer and owner[1] in needed):
                    continue
                age = -1 if owner is None else self.stamp[slot]
                if best is None or age < best[0]:
                    best = (age, slot)
            assert best is not None
            victims.append(best[1])
        for expert, slot in zip([e for e, m in zip(query, missing, strict=True) if m], sorted(victims), strict=True):
            self.owner[slot] = (layer, expert)
            self.stamp[slot] = self.now
        return [self.owner.index((layer, e)) for e in query], missing


def check_tables(state: AdmissionState) -> None:
    """slot_of and owner are inverse to each other."""
    slot_of, owner = state.slot_of.flatten().tolist(), state.owner.tolist()
    assert sorted(s for s in slot_of if s >= 0) == [s for s, o in enumerate(owner) if o >= 0]
    assert all(owner[s] == key for key, s in enumerate(slot_of) if s >= 0)


def run_layer(state: AdmissionState, model: Model, layer: int, experts: list[int], max_query: int) -> list[int]:
    """One layer's step through both; returns the experts fetched."""
    queries, at_once = model.cut(layer, experts, max_query)
    result = cut(state, layer, torch.tensor(experts, dtype=torch.int64), max_query)
    assert [q.tolist() for q in result.queries] == queries and result.at_once == at_once
    fetched: list[int] = []
    done: list[int] = []
    for query in queries:
        needed = experts if at_once else [e for e in experts if e not in done]
        kept = {e: model.where(layer, e) for e in needed if model.where(layer, e) is not None}
        slots, missing = admit(
            state, layer, torch.tensor(query, dtype=torch.int64), torch.tensor(needed, dtype=torch.int64)
        )
        assert (slots.tolist(), missing.tolist()) == model.admit(layer, query, needed)
        fetched += [e for e, m in zip(query, missing.tolist(), strict=True) if m]
        done += query
        assert [state.slot_of[layer, e].item() for e in query] == slots.tolist()  # all resident, each where it says
        assert all(state.slot_of[layer, e].item() == slot for e, slot in kept.items())  # nothing needed moved
        check_tables(state)
    if at_once:
        assert all(state.slot_of[layer, e].item() >= 0 for e in experts)
    assert len(fetched) == len(set(fetched))
    return fetched


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_equal_the_brute_force_model(seed: int) -> None:
    """3,000 short histories over small pools, where evictions are frequent, and 80 longer ones over larger pools."""
    rng = random.Random(seed)
    for size, steps, histories in ((6, 6, 375), (24, 20, 10)):
        for _ in range(histories):
            layers, experts = rng.randint(1, 3), rng.randint(1, size)
            slots, max_query = rng.randint(1, layers * experts + 2), rng.choice([1, 2, 3, 7, 128])
            state, model = new_state(layers, experts, slots), Model(slots)
            for _ in range(steps):
                layer = rng.randrange(layers)
                routed = sorted(rng.sample(range(experts), rng.randint(0, experts)))
                resident = [e for e in routed if model.where(layer, e) is not None]
                fetched = run_layer(state, model, layer, routed, max_query)
                assert sorted(fetched + resident) == routed  # a resident one is never fetched, any other exactly once


@settings(max_examples=60)
@given(st.data())
def test_hypothesis_histories_equal_the_brute_force_model(data: st.DataObject) -> None:
    """Few, but shrunk to the smallest when they fail."""
    experts, slots = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    max_query = data.draw(st.sampled_from([1, 2, 3, 128]))
    state, model = new_state(2, experts, slots), Model(slots)
    routed = st.sets(st.integers(0, experts - 1)).map(sorted)
    for layer, wanted in data.draw(st.lists(st.tuples(st.integers(0, 1), routed), max_size=12)):
        run_layer(state, model, layer, wanted, max_query)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129])
def test_cut_sizes(count: int) -> None:
    """Query lengths by hand."""
    result = cut(new_state(1, 200, 200), 0, torch.arange(count), 128)
    assert [len(q) for q in result.queries] == {0: [], 1: [1], 127: [127], 128: [128], 129: [128, 1]}[count]
    assert result.at_once


@pytest.mark.parametrize(("slots", "at_once"), [(127, False), (128, True), (129, True)])
def test_a_layer_that_just_fits_is_admitted_at_once(slots: int, at_once: bool) -> None:
    result = cut(new_state(1, 128, slots), 0, torch.arange(128), 128)
    assert result.at_once == at_once
    assert [len(q) for q in result.queries] == ([128] if at_once else [127, 1])


def test_least_recently_used_goes_first_by_hand() -> None:
    """Three slots, A B C, then B used again, then D and E: A and C go, in that order of age."""
    state = new_state(1, 5, 3)
    for expert in (0, 1, 2, 1):
        query = torch.tensor([expert])
        admit(state, 0, query, query)
    slots, _ = admit(state, 0, torch.tensor([3]), torch.tensor([3]))
    assert slots.tolist() == [0]
    slots, _ = admit(state, 0, torch.tensor([4]), torch.tensor([4]))
    assert slots.tolist() == [2]


def test_neighbours_get_neighbouring_slots() -> None:
    """Ascending victims to ascending experts, so that runs of records become one copy."""
    slots, missing = admit(new_state(1, 8, 8), 0, torch.arange(2, 6), torch.arange(2, 6))
    assert slots.tolist() == [0, 1, 2, 3] and missing.all()


def test_invalidated_slots_are_free_again() -> None:
    state = new_state(2, 4, 4)
    admit(state, 1, torch.arange(4), torch.arange(4))
    invalidate(state, 1, torch.tensor([1, 3]))
    invalidate(state, 1, torch.tensor([3]))  # absent: nothing happens
    check_tables(state)
    assert state.slot_of[1].tolist() == [0, -1, 2, -1]
    slots, _ = admit(state, 0, torch.tensor([0]), torch.tensor([0]))
    assert slots.tolist() == [1]


def test_too_few_slots_is_an_error_and_changes_no_table() -> None:
    state = new_state(1, 4, 2)
    with pytest.raises(ValueError, match="do not fit"):
        admit(state, 0, torch.arange(3), torch.arange(3))
    assert state.owner.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="at least 1"):
        cut(state, 0, torch.arange(1), 0)
