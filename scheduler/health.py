"""Whether requests are accepted, and if not, why and for how long still. Reads only."""

from copyengine.wire.lifecycle import Progress
from scheduler.lane import Lane
from scheduler.protocol import HealthPhase, HealthReply
from scheduler.ticket import Service


def health_reply(
    model: str, service: Service | None, progress: Progress | None, draining: bool, restarts: bool
) -> HealthReply:
    """`service` is None until all has loaded, of which `progress` was heard last; `restarts`: dead workers are started
    anew."""
    lanes = service.lanes if service else []
    phase = _phase(lanes, draining, restarts)
    loading = progress if service is None else _loaded_anew(lanes)
    return HealthReply(
        ready=phase == "ready",
        phase=phase,
        model=model,
        max_model_len=service.max_model_len if service else 0,
        vocab_size=service.vocab_size if service else 0,
        loading=f"{loading.worker} {loading.phase}".lstrip() if loading else "",
        done_nbytes=loading.done_nbytes if loading else 0,
        total_nbytes=loading.total_nbytes if loading else 0,
        detail=lanes[0].death if phase in ("restarting", "dead") else "",
        places=service.max_queued + sum(lane.core.places for lane in lanes if lane.alive) if service else 0,
    )


def _phase(lanes: list[Lane], draining: bool, restarts: bool) -> HealthPhase:
    if lanes and not any(lane.alive for lane in lanes):
        return "restarting" if restarts else "dead"
    if draining:
        return "draining"
    return "ready" if lanes else "loading"


def _loaded_anew(lanes: list[Lane]) -> Progress | None:
    """What the first of the workers that are loading now was heard of last."""
    return next((lane.loading for lane in lanes if lane.loading), None)
