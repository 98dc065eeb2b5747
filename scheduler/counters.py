"""What the counters say now, of the engine and of each of its workers. Reads only."""

from collections.abc import Sequence

from scheduler.lane import Lane
from scheduler.protocol import StatsReply, WorkerCounters
from scheduler.ticket import Tally
from scheduler.traffic import total


def stats_reply(lanes: Sequence[Lane], tally: Tally, dropped_frames: int) -> StatsReply:
    """All of it; without lanes while the model still loads."""
    cores = [lane.core for lane in lanes]
    return StatsReply(
        waiting=sum(core.waiting for core in cores),
        running=sum(core.running for core in cores),
        finished=tally.finished,
        failed=tally.failed,
        aborted=tally.aborted,
        refused=tally.refused,
        prompt_tokens=tally.prompt_tokens,
        generated_tokens=tally.generated_tokens,
        kv_pages_free=sum(core.pages.free for core in cores),
        kv_pages_cached=sum(core.pages.cached for core in cores),
        kv_pages_total=sum(core.pages.total for core in cores),
        cached_tokens=sum(core.cached_tokens for core in cores),
        preempted=sum(core.preempted for core in cores),
        queried_tokens=sum(core.queried_tokens for core in cores),
        kv_pages_available=sum(core.pages.available for core in cores),
        decode=total([core.counters["decode"] for core in cores]),
        demand=total([core.counters["demand"] for core in cores]),
        streamed=total([core.counters["streamed"] for core in cores]),
        dropped_frames=dropped_frames,
        workers=[worker_counters(lane) for lane in lanes],
        state_slots_free=sum(core.pages.states.free for core in cores),
        state_snapshots=sum(core.pages.states.snapshots for core in cores),
        state_slots_total=sum(core.pages.states.total for core in cores),
        state_nbytes=sum(core.limits.state_nbytes for core in cores),
        slots=sum(lane.facts.slots for lane in lanes),
        stream_slots=sum(lane.facts.stream_slots for lane in lanes),
        restarts=sum(lane.deaths for lane in lanes),
        bank_nbytes=max((lane.facts.bank_nbytes for lane in lanes), default=0),
        pinned_nbytes=max((lane.facts.pinned_nbytes for lane in lanes), default=0),
        not_finite=tally.not_finite,
    )


def worker_counters(lane: Lane) -> WorkerCounters:
    """One worker's part."""
    core = lane.core
    return WorkerCounters(
        name=lane.name,
        alive=lane.alive,
        waiting=core.waiting,
        running=core.running,
        kv_pages_free=core.pages.free,
        kv_pages_cached=core.pages.cached,
        kv_pages_total=core.pages.total,
        kv_pages_available=core.pages.available,
        resident_slots=lane.resident,
        decode=core.counters["decode"],
        demand=core.counters["demand"],
        streamed=core.counters["streamed"],
        state_slots_free=core.pages.states.free,
        state_snapshots=core.pages.states.snapshots,
        state_slots_total=core.pages.states.total,
        state_nbytes=core.limits.state_nbytes,
        slots=lane.facts.slots,
        stream_slots=lane.facts.stream_slots,
        restarts=lane.deaths,
        failed_steps=dict(lane.failed_steps),
    )
