"""What goes on at this moment: which requests are where, and which experts are in the slots of which worker."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from scheduler.lane import Lane
from scheduler.protocol import ActivityReply, RunningRequest, WorkerResidency
from scheduler.request import Request
from scheduler.ticket import Ticket

MAX_LISTED = 256
"""Requests in one reply."""

ANSWER_S = 1.0
"""Seconds that workers have to say what they hold, which they do between two steps."""


async def ask_residency(lanes: Sequence[Lane]) -> None:
    """Returns when all workers have said what they hold, or ANSWER_S later."""
    now_s = time.monotonic()
    asked = [asking for lane in lanes if lane.alive and (asking := lane.residency.ask(now_s))]
    if asked:
        await asyncio.wait(asked, timeout=ANSWER_S)


def activity_reply(tickets: Mapping[tuple[bytes, str], Ticket], lanes: Sequence[Lane]) -> ActivityReply:
    """Of `tickets` by client and request id; `lanes` are none while the model loads."""
    now_s = time.monotonic()
    going_on = [
        _told(request_id, ticket, index, request, now_s)
        for (_, request_id), ticket in tickets.items()
        for index, request in enumerate(ticket.served)
        if request.phase != "ended"
    ]
    going_on.sort(key=lambda told: (told.phase == "waiting", -told.age_s))
    held = [told for lane in lanes if lane.alive and (told := _residency(lane, now_s))]
    return ActivityReply(going_on[:MAX_LISTED], held, max(0, len(going_on) - MAX_LISTED))


def _told(request_id: str, ticket: Ticket, index: int, request: Request, now_s: float) -> RunningRequest:
    assert request.phase != "ended" and ticket.lane
    return RunningRequest(
        request_id=request_id,
        phase=request.phase,
        prompt_tokens=request.prompt_tokens,
        computed_tokens=request.computed,
        new_tokens=request.new_tokens,
        age_s=now_s - ticket.arrived_s,
        worker=ticket.lane.name,
        index=index,
    )


def _residency(lane: Lane, now_s: float) -> WorkerResidency | None:
    known = lane.residency
    if known.answer is None:
        return None
    return WorkerResidency(
        name=lane.name,
        layers=known.answer.layers,
        experts=known.answer.experts,
        resident=known.answer.resident,
        age_s=known.age_s(now_s),
    )
