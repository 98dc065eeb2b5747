"""The scored policy against scores summed up from every use, in real numbers; and its table against the formula."""

import math
import random

import pytest
import torch

from kernels.admit import AdmissionState, admit, cut, half_life_of, invalidate, new_state
from kernels.admit.lrfu import REACH, STEPS, bumps

HALF_LIFE = 512


class Scores:
    """Every slot's uses as (time, weight): what is summed up is the definition itself."""

    def __init__(self, slots: int) -> None:
        self.uses: list[list[tuple[int, float]]] = [[] for _ in range(slots)]
        self.now = 0

    def score(self, slot: int) -> float:
        return sum(weight * 2 ** (-(self.now - time) / HALF_LIFE) for time, weight in self.uses[slot])

    def use(self, slot: int, counts: bool) -> None:
        """One more use; or, if it does not count, as much as is missing of the score of one."""
        self.uses[slot].append((self.now, 1.0 if counts else max(0.0, 1.0 - self.score(slot))))


def step(state: AdmissionState, model: Scores, layer: int, routed: list[int], counts: bool, max_query: int) -> int:
    """One layer's step; checks each victim, and returns how many there were of which it mattered."""
    queries = cut(state, layer, torch.tensor(routed, dtype=torch.int64), max_query)
    mattered = 0
    for i, query in enumerate(queries.queries):
        needed = torch.tensor(routed) if queries.at_once else torch.cat(queries.queries[i:])
        before = state.owner.clone()
        held = set(state.slot_of[layer, needed].tolist())
        model.now += 1
        slots, missing = admit(state, layer, query, needed, counts)
        victims = slots[missing].tolist()
        others = [s for s in range(state.slots) if s not in held and s not in victims]
        worst = max((model.score(s) for s in victims if before[s] >= 0), default=0.0)
        left = min((model.score(s) if before[s] >= 0 else -1.0 for s in others), default=math.inf)
        # Bumps are looked up in steps, and a stamp hands its error on to the next, so that near ties go either way.
        assert worst <= max(0.0, left * 2 ** (32 / STEPS) + 2**-REACH), (worst, left)
        mattered += worst > 0 and left < math.inf
        for slot, missed in zip(slots.tolist(), missing.tolist(), strict=True):
            if missed:
                model.uses[slot] = [(model.now, 1.0)]
            else:
                model.use(slot, counts)
    return mattered


@pytest.mark.parametrize("seed", range(4))
def test_only_slots_of_the_lowest_scores_are_victims(seed: int) -> None:
    """Against the definition of Lee et al., with steps of decode, which count, and of demand, which do not."""
    rng = random.Random(seed)
    mattered = 0
    for _ in range(4):
        experts, slots = 12, rng.randint(6, 30)
        state, model = new_state(3, experts, slots, half_life=HALF_LIFE), Scores(slots)
        max_query = rng.choice([1, 3, 128])
        favourites = [rng.sample(range(experts), 3) for _ in range(3)]
        for _ in range(60):
            if rng.random() < 0.1:
                state.clock.add_(300)  # as if other layers had been admitted
                model.now += 300
            layer = rng.randrange(3)
            routed = sorted({*rng.sample(favourites[layer], 2), *rng.sample(range(experts), rng.randint(0, 4))})
            mattered += step(state, model, layer, routed, rng.random() < 0.7, max_query)
    assert mattered > 100


def test_often_used_stays_where_lru_would_evict_it() -> None:
    """By hand: three slots; expert 0 used five times, then 1, 2 once each, and 3: of lru 0 would go, here 1 does."""
    for half_life, evicted in ((0, 0), (HALF_LIFE, 1)):
        state = new_state(1, 4, 3, half_life=half_life)
        for expert in (0, 0, 0, 0, 0, 1, 2, 3):
            admit(state, 0, torch.tensor([expert]), torch.tensor([expert]), counts=True)
        assert state.slot_of[0, evicted] == -1


def test_uses_that_do_not_count_make_nothing_frequent() -> None:
    """By hand: as above, but by prefill alone: the oldest goes."""
    state = new_state(1, 4, 3, half_life=HALF_LIFE)
    for expert in (0, 0, 0, 0, 0, 1, 2, 3):
        admit(state, 0, torch.tensor([expert]), torch.tensor([expert]), counts=False)
    assert state.slot_of[0].tolist() == [-1, 1, 2, 0]


def test_what_was_needed_earlier_in_a_layer_is_never_a_victim_whatever_its_score() -> None:
    """Three queries of a layer over as many slots: the first ones', used once, stay before hot ones of others."""
    state = new_state(2, 6, 6, half_life=HALF_LIFE)
    for _ in range(20):
        admit(state, 1, torch.arange(6), torch.arange(6), counts=True)
    for query in cut(state, 0, torch.arange(6), 2).queries:
        admit(state, 0, query, torch.arange(6), counts=True)
    assert (state.slot_of[0] >= 0).all() and (state.slot_of[1] == -1).all()


def test_a_forgotten_slot_is_free_whatever_it_scored() -> None:
    """Against the rule that free slots go first."""
    state = new_state(1, 4, 2, half_life=HALF_LIFE)
    for _ in range(9):
        admit(state, 0, torch.tensor([0, 1]), torch.tensor([0, 1]), counts=True)
    invalidate(state, 0, torch.tensor([1]))
    admit(state, 0, torch.tensor([3]), torch.tensor([3]), counts=True)
    assert state.slot_of[0].tolist() == [0, -1, -1, 1]


def test_the_table_is_the_formula() -> None:
    """Against half_life * log2(1 + 2 ** (-d / half_life)) at both ends and between; stamps stay within REACH."""
    table = bumps(HALF_LIFE)
    assert table.shape == (2 * REACH * STEPS,) and table[REACH * STEPS] == HALF_LIFE
    for i in (0, 1, 500, 2 * REACH * STEPS - 1):
        d = i * (HALF_LIFE // STEPS) - REACH * HALF_LIFE
        formula = round(HALF_LIFE * math.log2(1 + 2 ** (-d / HALF_LIFE)))
        assert table[i] == min(formula, REACH * HALF_LIFE)
    state = new_state(1, 1, 1, half_life=256)
    for _ in range(5000):
        admit(state, 0, torch.tensor([0]), torch.tensor([0]), counts=True)
        assert state.clock <= state.last_used[0] <= state.clock + REACH * 256
    assert bumps(0).numel() == 0 and half_life_of(48, 8) == 384 and half_life_of(1, 1) == 1
    with pytest.raises(ValueError, match="half_life -1"):
        new_state(1, 1, 1, half_life=-1)
