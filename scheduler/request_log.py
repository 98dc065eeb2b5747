"""One log line for each request that ends: event=request and its figures, in a fixed order, easy to search and sum.

Times are in seconds, MB are 10^6 bytes.
"""

from typing import Literal

from copyengine.wire.errors import RequestRefused
from copyengine.wire.logs import Log, Value
from scheduler.protocol import Failed, Finished

OWN_WORDS = frozenset(
    (
        *("queue_full", "not_ready", "draining", "context_length_exceeded", "encode_timeout"),
        *("worker_failed", "bad_logits", "device_out_of_memory", "copy_damaged"),
    )
)
"""Codes whose detail is the engine's own words and numbers. That of others may quote the request: of these the client
alone learns it."""

log = Log(__name__)


def log_end(request_id: str, so_far: Finished, final: Finished | Failed | None) -> None:
    """An accepted request has ended; `final` is its last reply, None if its client left before.
    `so_far` are its figures if that has none."""
    match final:
        case Finished(reason=reason):
            log.info("request", id=request_id, end=reason, **_figures(final))
        case Failed(code=code, detail=detail):
            log.info("request", id=request_id, end=code, **_figures(so_far), **_detail(code, detail))
        case None:
            log.info("request", id=request_id, end="left", **_figures(so_far))


def log_refused(request_id: str, refused: RequestRefused) -> None:
    """A request was not accepted; its id is empty if its client gave none."""
    log.info("request", id=request_id, end="refused", code=refused.code, **_detail(refused.code, refused.detail))


def log_unaccepted(request_id: str, end: Literal["left", "internal"]) -> None:
    """A request has ended before it was accepted, though not refused: nothing was computed for it."""
    log.info("request", id=request_id, end=end)


def _detail(code: str, detail: str) -> dict[str, Value]:
    return {"detail": detail} if code in OWN_WORDS else {}


def _figures(ended: Finished) -> dict[str, Value]:
    usage, timing = ended.usage, ended.timing
    return {
        "n": len(ended.choices) or 1,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "new": usage.new_tokens,
        "queued": f"{timing.queued_s:.4f}",
        "ttft": f"{timing.ttft_s:.4f}",
        "tpot": f"{timing.tpot_s:.5f}",
        "total": f"{timing.total_s:.4f}",
        "demand_chunks": usage.demand_chunks,
        "streamed_chunks": usage.streamed_chunks,
        "hits": usage.expert_hits,
        "misses": usage.expert_misses,
        "copied_mb": f"{usage.copied_nbytes / 1e6:.1f}",
    }
