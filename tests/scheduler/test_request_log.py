"""The line that a request leaves in the log, against a reading of it by the rule it is written by."""

import json
import logging
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Failed, Finished, Timing, Usage
from scheduler.request_log import end_line, log_end, log_refused, refusal_line

USAGE = Usage(
    prompt_tokens=120,
    new_tokens=8,
    cached_tokens=96,
    demand_chunks=1,
    streamed_chunks=0,
    expert_hits=900,
    expert_misses=60,
    copied_nbytes=189_000_000,
)
FINISHED = Finished("length", USAGE, Timing(queued_s=0.001, ttft_s=0.25, tpot_s=0.0123, total_s=0.34))


def test_a_finished_request_says_what_it_took() -> None:
    """Word for word: what reads logs depends on it."""
    assert end_line("c0ffee", 120, FINISHED) == (
        "request id=c0ffee end=length prompt=120 cached=96 new=8 queued=0.0010 ttft=0.2500 tpot=0.01230 total=0.3400 "
        "demand_chunks=1 streamed_chunks=0 hits=900 misses=60 copied_mb=189.0"
    )


def test_one_that_failed_and_one_whose_client_left() -> None:
    failed = Failed("worker_failed", "it did not land")
    assert end_line("a", 3, failed) == 'request id=a end=worker_failed prompt=3 detail="it did not land"'
    assert end_line("a", 3, None) == "request id=a end=left prompt=3"


def test_one_that_was_refused() -> None:
    refused = RequestRefused("queue_full", "2 requests wait already")
    line = 'request id="" end=refused code=queue_full detail="2 requests wait already"'
    assert refusal_line("", refused) == line


@given(st.text(max_size=128))
def test_no_name_that_a_client_chooses_breaks_the_line_or_adds_to_it(request_id: str) -> None:
    """Read back by JSON's rule if quoted, or else as it stands."""
    line = end_line(request_id, 3, None)
    assert len(line.splitlines()) == 1 and line.isascii()
    value = line.removeprefix("request id=").removesuffix(" end=left prompt=3")
    assert (json.loads(value) if value.startswith('"') else value) == request_id
    assert value.startswith('"') or shlex.split(value) == [value]


def test_nothing_is_made_up_where_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "scheduler.request_log"):
        log_end("a", 3, FINISHED)
        log_refused("a", RequestRefused("draining", "it stops"))
    assert not caplog.records
    with caplog.at_level(logging.INFO, "scheduler.request_log"):
        log_end("a", 3, FINISHED)
        log_refused("a", RequestRefused("draining", "it stops"))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == end_line("a", 3, FINISHED) and second.startswith("request id=a end=refused code=draining ")
