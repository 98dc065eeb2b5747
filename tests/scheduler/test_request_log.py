"""The line that a request leaves in the log, against a reading of it by the rule it is written by."""

import json
import logging
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Choice, Failed, Finished, Timing, Usage
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
NOTHING = Finished("abort", Usage(0, 0, 0, 0, 0, 0, 0, 0), Timing(0.0, 0.0, 0.0, 0.0))
FINISHED = Finished("length", USAGE, Timing(queued_s=0.001, ttft_s=0.25, tpot_s=0.0123, total_s=0.34))


def test_a_finished_request_says_what_it_took() -> None:
    """Word for word: what reads logs depends on it."""
    assert end_line("c0ffee", NOTHING, FINISHED) == (
        "request id=c0ffee end=length n=1 prompt=120 cached=96 new=8 queued=0.0010 ttft=0.2500 tpot=0.01230 "
        "total=0.3400 demand_chunks=1 streamed_chunks=0 hits=900 misses=60 copied_mb=189.0"
    )


def test_one_that_failed_and_one_whose_client_left() -> None:
    failed = Failed("worker_failed", "it did not land")
    figures = end_line("c0ffee", NOTHING, FINISHED).partition(" n=1 ")[2]
    assert end_line("a", FINISHED, failed) == f'request id=a end=worker_failed n=1 {figures} detail="it did not land"'
    assert end_line("a", FINISHED, None) == f"request id=a end=left n=1 {figures}"


def test_one_of_several_answers() -> None:
    several = replace(FINISHED, choices=[Choice("length", USAGE, FINISHED.timing)] * 3)
    assert " end=length n=3 prompt=120 " in end_line("a", NOTHING, several)


def test_one_that_was_refused() -> None:
    refused = RequestRefused("queue_full", "2 requests wait already")
    line = 'request id="" end=refused code=queue_full detail="2 requests wait already"'
    assert refusal_line("", refused) == line


@given(st.text(max_size=128))
def test_no_name_that_a_client_chooses_breaks_the_line_or_adds_to_it(request_id: str) -> None:
    """Read back by JSON's rule if quoted, or else as it stands."""
    line = end_line(request_id, NOTHING, None)
    assert len(line.splitlines()) == 1 and line.isascii()
    value = line.removeprefix("request id=").partition(" end=left n=1 prompt=0 ")[0]
    assert (json.loads(value) if value.startswith('"') else value) == request_id
    assert value.startswith('"') or shlex.split(value) == [value]


def test_nothing_is_made_up_where_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "scheduler.request_log"):
        log_end("a", NOTHING, FINISHED)
        log_refused("a", RequestRefused("draining", "it stops"))
    assert not caplog.records
    with caplog.at_level(logging.INFO, "scheduler.request_log"):
        log_end("a", NOTHING, FINISHED)
        log_refused("a", RequestRefused("draining", "it stops"))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == end_line("a", NOTHING, FINISHED) and second.startswith("request id=a end=refused code=draining ")
