"""What an engine is put together from: its sizes against the budget's sums, and what is refused."""

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from copyengine.budget import Budget, Wanted
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.planning import Plan
from copyengine.protocol import Loaded as BanksLoaded
from copyengine.wire.errors import ConfigError
from kernels.admit import half_life_of
from kernels.formats import ExpertFormat, layout
from worker import building
from worker.backend import PoolOrder
from worker.host_backend import HostBackend
from worker.protocol import Load

HOST = HostBackend()
SIZES = Sizes(layers=2, hidden=32, intermediate=16, experts=6, experts_per_token=2, heads=2, kv_heads=1, vocab_size=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, SIZES)
    return str(directory)


def budget_with(available_nbytes: int, load: Load, monkeypatch: pytest.MonkeyPatch) -> Budget:
    monkeypatch.setattr("copyengine.available.host_nbytes", lambda: available_nbytes)
    return building.fit(building.prepare(load, HOST), load, HOST).budget


def test_the_banks_memory_is_not_asked_for_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The banks are there, so their memory is not available: exactly the rest is needed, and one byte less is refused.

    Sizes that were fixed before the banks were there are the ones that come out now.
    """
    load = Load(model, slots=12, kv_tokens=64, max_step_tokens=64, demand_prefill=False)
    budget = budget_with(1 << 40, load, monkeypatch)
    own_nbytes = budget.total_nbytes - budget.bank_nbytes
    assert budget.bank_nbytes > 0
    assert budget_with(own_nbytes, load, monkeypatch) == budget
    with pytest.raises(ConfigError, match="needed"):
        budget_with(own_nbytes - 1, load, monkeypatch)


def test_automatic_sizes_come_out_as_if_all_were_planned_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plan that launch.py makes before anything is allocated, from roomy down to what is just refused."""
    load = Load(model, max_step_tokens=64)
    checked = building.prepare(load, HOST)
    record = checked.record
    assert record is not None
    whole = checked.budget.total_nbytes
    bank = checked.budget.bank_nbytes
    for available in (1 << 40, 2 * whole, math.ceil(1.1 * whole), whole):
        wanted = Wanted(max_step_tokens=64)
        try:
            planned = Plan(checked.model.spec, checked.dtype, record.record_nbytes, available).settled(wanted)
        except ConfigError:
            with pytest.raises(ConfigError):
                budget_with(available - bank, load, monkeypatch)
        else:
            assert budget_with(available - bank, load, monkeypatch) == planned


def test_input_scales_are_wanted_for_every_bank_of_quantised_inputs_alone(model: str) -> None:
    """Against the number of banks, 2; those of the right number are the pool's order's, bank by bank."""
    plain = building.prepare(Load(model, slots=12, kv_tokens=64, max_step_tokens=64), HOST)
    assert plain.record is not None
    quantised = replace(plain, record=layout(ExpertFormat("nvfp4", quantised_inputs=True), 32, 16))
    orders = Orders()

    def banks(scales: list[tuple[float, float]]) -> BanksLoaded:
        return BanksLoaded(0, 0, 0, 0, 0, 0.0, input_scales=scales)

    def make(prepared: building.Prepared, scales: list[tuple[float, float]]) -> None:
        building.make_pool(prepared, orders, "w", "run", lambda: None, print, lambda _: None, banks(scales))  # type: ignore[arg-type]

    for prepared, scales in ((plain, [(1.0, 1.0)] * 2), (quantised, []), (quantised, [(1.0, 1.0)])):
        with pytest.raises(ConfigError, match=f"input scales of {len(scales)} MoE layers"):
            make(prepared, scales)
    make(plain, [])
    make(quantised, [(0.5, 0.25), (2.0, 1.0)])
    assert [list(order.input_scales) for order in orders.heard] == [[], [(0.5, 0.25), (2.0, 1.0)]]


class Orders:
    """A backend that only hears what pool it should make."""

    def __init__(self) -> None:
        self.heard: list[PoolOrder] = []

    def make_slots(self, order: PoolOrder) -> tuple[None, None]:
        self.heard.append(order)
        return None, None


def test_the_cache_policy_is_the_pools(model: str, tmp_path: Path) -> None:
    """Against the policy asked for: "lrfu" has a half-life of whole steps of the model, and none fits a dense one."""
    load = Load(model, slots=12, kv_tokens=64, max_step_tokens=64)
    assert building.prepare(load, HOST).half_life == 0
    prepared = building.prepare(replace(load, cache_policy="lrfu"), HOST)
    assert prepared.half_life == half_life_of(2, building.HALF_LIFE_STEPS)
    assert building.fit(prepared, load, HOST).half_life == prepared.half_life
    write_random_model(tmp_path, replace(SIZES, experts=0))
    with pytest.raises(ConfigError, match="--cache-policy lrfu: a dense model"):
        building.prepare(replace(load, model=str(tmp_path), slots=0, cache_policy="lrfu"), HOST)
