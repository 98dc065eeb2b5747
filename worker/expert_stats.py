"""Adding up expert traffic."""

from worker.protocol import ExpertStats, Mode

MODES: tuple[Mode, ...] = ("decode", "demand", "streamed")


def count(stats: ExpertStats, steps: int = 0, hits: int = 0, misses: int = 0, record_nbytes: int = 0) -> ExpertStats:
    """`stats` and this many steps, hits and misses (of `record_nbytes` bytes each) more."""
    return add(stats, ExpertStats(steps, hits + misses, hits, misses, misses * record_nbytes))


def add(a: ExpertStats, b: ExpertStats) -> ExpertStats:
    """The sum of two."""
    return ExpertStats(
        steps=a.steps + b.steps,
        lookups=a.lookups + b.lookups,
        hits=a.hits + b.hits,
        misses=a.misses + b.misses,
        copied_nbytes=a.copied_nbytes + b.copied_nbytes,
    )
