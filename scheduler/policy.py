"""Who is next: which kind of step, and which worker takes a new request. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

StepKind = Literal["prefill", "decode"]


def next_kind(prefilling: bool, decoding: bool, last: StepKind) -> StepKind | None:
    """What the next step is, given who waits for which and what the last step was.

    Prefill and decode steps alternate while both have work: a long prompt delays running answers by one chunk at a
    time, and running answers delay a prompt by one token each.
    """
    if prefilling and decoding:
        return "decode" if last == "prefill" else "prefill"
    if prefilling:
        return "prefill"
    return "decode" if decoding else None


def least_loaded(loads: Sequence[int]) -> int:
    """Index of the smallest load, the first of equals. `loads` must not be empty."""
    return min(range(len(loads)), key=lambda i: loads[i])


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` split by `weights`, in whole numbers that add up to `total`; all to the first if all weights are 0.

    The share of weight w is total * w / sum(weights) rounded down or up.
    """
    whole = sum(weights)
    if whole == 0:
        return [total if i == 0 else 0 for i in range(len(weights))]
    bounds, seen = [0], 0
    for weight in weights:
        seen += weight
        bounds.append(total * seen // whole)
    return [after - before for before, after in pairwise(bounds)]
