"""The routing log over real slots: against the steps as they were given, and counters of the steps themselves."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.worker.test_host_slots import RECORD, Rig, random_routing
from worker.expert_stats import MODES
from worker.geometry import SlotGeometry

LAYERS, EXPERTS, STEPS = 3, 8, 10


@pytest.fixture(params=[(5, 0), (9, 0), (9, 256)], ids=str)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    slots, half_life = request.param
    made = Rig(SlotGeometry(LAYERS, EXPERTS, RECORD, slots, logged_steps=STEPS, half_life=half_life))
    made.attach()
    yield made
    made.close()


def test_a_window_is_the_first_steps_since_the_one_before(rig: Rig) -> None:
    """Residents, routing, modes and hits; the oracle, whose slots start with the same, hits as much or more."""
    rng = random.Random(1)
    gained = 0
    for _ in range(4):
        resident = rig.residents()
        steps = []
        for mode in rng.choices(MODES, k=2 * STEPS):
            routed = random_routing(rng, rig.slots.geometry)
            stats = rig.step(mode, routed)
            if mode != "streamed":
                steps.append((mode, routed, stats))
        window = rig.slots.log.take()
        assert window is not None
        assert {(int(layer), int(expert)) for layer, expert in np.argwhere(window.resident)} == resident
        assert [[np.flatnonzero(row).tolist() for row in step] for step in window.routed] == [
            routed for _, routed, _ in steps[:STEPS]
        ]
        decodes = [stats for mode, _, stats in steps[:STEPS] if mode == "decode"]
        figures = window.figures()
        assert (figures.steps, figures.hits) == (len(decodes), sum(stats.hits for stats in decodes))
        assert figures.lookups == sum(stats.lookups for stats in decodes)
        assert figures.hits <= figures.oracle_hits <= figures.lookups
        gained += figures.oracle_hits - figures.hits
    assert gained > 0


def test_a_failed_step_begins_the_log_anew(rig: Rig) -> None:
    rig.step("decode", [[0], [1], [2]])
    rig.slots.begin_step("decode")
    rig.slots.abort_step()
    assert rig.slots.log.take() is None
    rig.step("decode", [[0], [], [2]])
    window = rig.slots.log.take()
    assert window is not None and window.resident[0, 0] and (window.hits, window.lookups) == (2, 2)
    assert rig.slots.log.take() is None
