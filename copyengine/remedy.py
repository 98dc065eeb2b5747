"""Which setting to change so that a plan fits that does not: pure, no I/O."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from copyengine.budget import GPU_RESERVE_NBYTES, Budget, Wanted, least_slots
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError

Shortage = Callable[[Wanted], int]
"""Bytes that are missing where most are, 0 or less if all fits. A setting that is lowered never makes it more."""


SHARES = 1000


class _Lever(NamedTuple):
    """A setting that takes memory: lowered to `least` at most, in steps of `step`."""

    flag: str
    field: str  # of Wanted
    now: int
    least: int
    step: int = 1


def remedy(spec: ModelSpec, dtype: str, wanted: Wanted, budget: Budget, shortage: Shortage) -> str:
    """The smallest change that makes the plan fit, in words.

    That is the one setting which has to be lowered by the smallest share of it; if no number alone is enough, a
    placement; then fewer workers; then all numbers, by the same share; then no demand prefill; else what else could be
    done.
    """
    short = _forgiving(shortage)
    levers = _levers(spec, wanted, budget)
    found = [(lever, value) for lever in levers if (value := _lowered(lever, wanted, short)) is not None]
    if found:
        lever, value = min(found, key=lambda each: (each[0].now - each[1]) / each[0].now)
        return f"use {lever.flag} {value} (now {lever.now})"
    for flag, changed in _other_placements(wanted):
        if short(changed) <= 0:
            return f"use {flag}"
    workers = _lowered(_Lever("--workers", "workers", wanted.workers, 1), wanted, short)
    if workers:
        return f"use --workers {workers} (now {wanted.workers})"
    together = _all_lowered(levers, wanted, short)
    if together:
        return "use " + " and ".join(f"{lever.flag} {value} (now {lever.now})" for lever, value in together)
    if not wanted.slots and short(replace(wanted, demand_prefill=False)) <= 0:
        return "use --demand-tokens 0"  # a pool may then be smaller
    if dtype == "float32":
        return "what cannot be made smaller does not fit: use --dtype bfloat16"
    return "what cannot be made smaller does not fit: give a smaller --model"


def _levers(spec: ModelSpec, wanted: Wanted, budget: Budget) -> list[_Lever]:
    """Automatic sizes are none: they are as small as they get where something does not fit."""
    page, least = wanted.page_tokens, least_slots(spec, wanted.demand_prefill)
    kv_tokens = budget.kv_tokens if wanted.kv_tokens else 0
    reserve = wanted.vram_reserve_nbytes if budget.reserve_nbytes else 0  # on the host nothing is kept for it
    levers = [
        _Lever("--slots", "slots", budget.slots if wanted.slots else 0, least),
        _Lever("--kv-tokens", "kv_tokens", kv_tokens, page, page),
        _Lever("--chunked-prefill-size", "max_step_tokens", wanted.max_step_tokens, 1),
        _Lever("--max-running-requests", "max_running", wanted.max_running, 1),
        _Lever("--state-slots", "state_slots", wanted.state_slots, wanted.max_running),
        _Lever("--vram-reserve-bytes", "vram_reserve_nbytes", reserve, GPU_RESERVE_NBYTES),
    ]
    return [lever for lever in levers if lever.now > lever.least]


def _lowered(lever: _Lever, wanted: Wanted, short: Shortage) -> int | None:
    """The largest value of the setting with which all fits; None if there is none."""

    def missing(steps: int) -> bool:
        return short(replace(wanted, **{lever.field: lever.least + steps * lever.step})) > 0

    steps = (lever.now - 1 - lever.least) // lever.step
    fitting = bisect_right(range(steps + 1), False, key=missing)
    return lever.least + (fitting - 1) * lever.step if fitting else None


def _all_lowered(levers: list[_Lever], wanted: Wanted, short: Shortage) -> list[tuple[_Lever, int]]:
    """The settings with values between the least and what they are, at the same place in SHARES; none if none fit."""

    def lowered(share: int) -> list[tuple[_Lever, int]]:
        spans = ((lever, (lever.now - lever.least) // lever.step * share // SHARES) for lever in levers)
        return [(lever, lever.least + steps * lever.step) for lever, steps in spans]

    def missing(share: int) -> bool:
        return short(replace(wanted, **{lever.field: value for lever, value in lowered(share)})) > 0

    fitting = bisect_right(range(SHARES), False, key=missing)
    return lowered(fitting - 1) if fitting else []


def _other_placements(wanted: Wanted) -> Iterator[tuple[str, Wanted]]:
    for flag, field in (("--token-embedding-placement", "embedding_placement"), ("--kv-placement", "kv_placement")):
        other = "host" if getattr(wanted, field) == "device" else "device"
        yield f"{flag} {other}", replace(wanted, **{field: other})


def _forgiving(shortage: Shortage) -> Shortage:
    """Settings that are refused fit nowhere."""

    def short(wanted: Wanted) -> int:
        try:
            return shortage(wanted)
        except ConfigError:
            return 1

    return short
