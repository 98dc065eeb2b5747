"""Expert traffic of steps: shared out among requests, and summed up. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from scheduler.protocol import ModeCounters
from worker.protocol import ExpertStats


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


def split_stats(stats: ExpertStats, tokens: Sequence[int]) -> list[ExpertStats]:
    """A step's traffic split among its requests by their tokens in it; the shares add up to the whole.

    Who asked for an expert first is not known, and of no meaning: the step fetched it once for all of them.
    """
    hits = apportion(stats.hits, tokens)
    misses = apportion(stats.misses, tokens)
    copied = apportion(stats.copied_nbytes, misses if stats.misses else tokens)
    return [
        ExpertStats(steps=stats.steps, lookups=h + m, hits=h, misses=m, copied_nbytes=nbytes)
        for h, m, nbytes in zip(hits, misses, copied, strict=True)
    ]


def plus(counters: ModeCounters, stats: ExpertStats, step_s: float) -> ModeCounters:
    """The counters with one more step, which took `step_s`."""
    sums = {name: getattr(counters, name) + getattr(stats, name) for name in ExpertStats.__struct_fields__}
    return ModeCounters(**sums, step_s=counters.step_s + step_s)


def total(counters: Sequence[ModeCounters]) -> ModeCounters:
    """Field-wise sum."""
    names = ModeCounters.__struct_fields__
    return ModeCounters(*(sum(getattr(c, name) for c in counters) for name in names))
