"""Who is next: which kind of step, and which worker takes a new request. Pure."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

StepKind = Literal["decode", "short", "long"]
"""A decode step, or a prefill step for requests that are short (chunking.py says which) or long."""

CACHED_PER_LOAD = 4
"""Cached tokens that are worth a token of load. Chosen, not measured: load is mostly tokens to be decoded, one a step,
and a prefill step computes many at once."""


class Turn(Struct, frozen=True):
    """What the last steps were."""

    decoded: bool = True  # the last step was a decode step
    prefilled: Literal["short", "long"] = "long"  # the last prefill step


def next_kind(turn: Turn, decode: bool, short: bool, long: bool) -> StepKind | None:
    """What the next step is, given who waits for which kind.

    Prefill and decode steps alternate while both have work: a long prompt delays running answers by one chunk at a
    time, and running answers delay a prompt by one token each. And among the prefill steps short and long ones do: who
    is the first short one waits for one chunk of a long one at most, and a long prompt for one chunk of short ones at a
    time.
    """
    if decode and not (turn.decoded and (short or long)):
        return "decode"
    if short and not (turn.prefilled == "short" and long):
        return "short"
    return "long" if long else None


def after(turn: Turn, kind: StepKind) -> Turn:
    """The turn once a step of `kind` has gone out."""
    return Turn(True, turn.prefilled) if kind == "decode" else Turn(False, kind)


def route(loads: Sequence[int], cached: Sequence[int]) -> int:
    """Index of the worker that a new request goes to. Neither list, one entry for each worker, may be empty.

    `loads` are the tokens each has still to compute or generate, `cached` the tokens of the prompt whose KV it has. The
    longest cached prefix decides, among equals the smallest load, then the first; but where that worker's load is above
    the smallest by more than the prefix is worth, the least loaded one takes the request and computes the prefix again:
    many requests for one prefix so spread over the workers.
    """
    workers = range(len(loads))
    idlest = min(workers, key=lambda i: loads[i])
    warmest = min(workers, key=lambda i: (-cached[i], loads[i]))
    return warmest if (loads[warmest] - loads[idlest]) * CACHED_PER_LOAD <= cached[warmest] else idlest
