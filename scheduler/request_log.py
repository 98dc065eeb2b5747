"""One structured log line for each request that ends: key=value, in a fixed order, easy to search and sum."""

import json
import logging
import re

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Failed, Finished

_PLAIN = re.compile(r"[\w.:+-]+", re.ASCII)
log = logging.getLogger(__name__)


def log_end(request_id: str, so_far: Finished, final: Finished | Failed | None) -> None:
    """Log that a request has ended, at level info."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", end_line(request_id, so_far, final))


def log_refused(request_id: str, refused: RequestRefused) -> None:
    """Log that a request was not accepted, at level info."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", refusal_line(request_id, refused))


def refusal_line(request_id: str, refused: RequestRefused) -> str:
    """Why a request was not accepted; its id is empty if its client gave none."""
    return f"request id={_quoted(request_id)} end=refused code={refused.code} detail={_quoted(refused.detail)}"


def end_line(request_id: str, so_far: Finished, final: Finished | Failed | None) -> str:
    """What is known of an accepted request that has ended; `final` is its last reply, None if its client left before.
    `so_far` are its figures if that has none.

    Times are in seconds, MB are 10^6 bytes. The client's words are quoted, as JSON does, unless they are plain.
    """
    match final:
        case Finished(reason=reason):
            return f"request id={_quoted(request_id)} end={reason} {_figures(final)}"
        case Failed(code=code, detail=detail):
            return f"request id={_quoted(request_id)} end={code} {_figures(so_far)} detail={_quoted(detail)}"
        case None:
            return f"request id={_quoted(request_id)} end=left {_figures(so_far)}"


def _figures(ended: Finished) -> str:
    usage, timing = ended.usage, ended.timing
    return (
        f"n={len(ended.choices) or 1} "
        f"prompt={usage.prompt_tokens} cached={usage.cached_tokens} new={usage.new_tokens} "
        f"queued={timing.queued_s:.4f} ttft={timing.ttft_s:.4f} tpot={timing.tpot_s:.5f} total={timing.total_s:.4f} "
        f"demand_chunks={usage.demand_chunks} streamed_chunks={usage.streamed_chunks} "
        f"hits={usage.expert_hits} misses={usage.expert_misses} copied_mb={usage.copied_nbytes / 1e6:.1f}"
    )


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
