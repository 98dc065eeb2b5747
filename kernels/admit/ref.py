"""Reference admission in plain torch."""

import torch
from torch import Tensor

from kernels.admit.lrfu import REACH, STEPS
from kernels.admit.state import ABSENT, FREE, AdmissionState, Cut

PROTECTED = torch.iinfo(torch.int64).max


def cut(state: AdmissionState, layer: int, experts: Tensor, max_query: int) -> Cut:
    """See `kernels.admit.cut`."""
    if experts.numel() <= state.slots:
        return Cut(_pieces(experts, max_query), at_once=True)
    resident = state.slot_of[layer, experts] != ABSENT
    longest = min(max_query, state.slots)
    return Cut(_pieces(experts[resident], longest) + _pieces(experts[~resident], longest), at_once=False)


def admit(state: AdmissionState, layer: int, query: Tensor, needed: Tensor, counts: bool) -> tuple[Tensor, Tensor]:
    """See `kernels.admit.admit`."""
    slots = state.slot_of[layer, query]
    missing = slots == ABSENT
    state.clock.add_(1)
    _use(state, slots[~missing].long(), counts)
    if bool(missing.any()):
        experts = query[missing]
        victims = _victims(state, layer, needed, experts.numel())
        _evict(state, victims)
        state.owner[victims] = (layer * state.experts + experts).to(torch.int32)
        state.slot_of[layer, experts] = victims.to(torch.int32)
        state.last_used[victims] = state.clock
        slots[missing] = victims.to(torch.int32)
    return slots, missing


def _use(state: AdmissionState, slots: Tensor, counts: bool) -> None:
    """The clock's time into `last_used`; with a scored policy a use that `counts` adds to the score, another one only
    makes it that of one use at least."""
    if not state.half_life:
        state.last_used[slots] = state.clock
        return
    before, time = state.last_used[slots], state.clock
    if counts:
        from_first = (time - before + REACH * state.half_life).clamp(0, 2 * REACH * state.half_life - 1)
        time = time + state.bumps[from_first * STEPS // state.half_life]
    state.last_used[slots] = torch.maximum(before, time)


def invalidate(state: AdmissionState, layer: int, experts: Tensor) -> None:
    """See `kernels.admit.invalidate`."""
    slots = state.slot_of[layer, experts]
    held = slots[slots != ABSENT].long()
    _evict(state, held)
    state.owner[held] = ABSENT
    state.last_used[held] = FREE


def forget_all(state: AdmissionState) -> None:
    """See `kernels.admit.forget_all`."""
    state.slot_of.fill_(ABSENT)
    state.owner.fill_(ABSENT)
    state.last_used.fill_(FREE)


def _pieces(experts: Tensor, longest: int) -> list[Tensor]:
    return [experts[i : i + longest] for i in range(0, experts.numel(), longest)]


def _victims(state: AdmissionState, layer: int, needed: Tensor, count: int) -> Tensor:
    """[count] int64 ascending: the slots of the smallest stamps that hold no needed expert of this layer."""
    held = state.slot_of[layer, needed]
    age = state.last_used.clone()
    age[held[held != ABSENT]] = PROTECTED
    victims = torch.argsort(age, stable=True)[:count]
    if victims.numel() < count or bool((age[victims] == PROTECTED).any()):
        raise ValueError(f"{count} experts do not fit: all but {victims.numel()} of {state.slots} slots are needed")
    return victims.sort().values


def _evict(state: AdmissionState, slots: Tensor) -> None:
    owners = state.owner[slots]
    state.slot_of.view(-1)[owners[owners != ABSENT].long()] = ABSENT
