"""The line that a request leaves in the log, against a reading of it by the rule it is written by."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from copyengine.wire.errors import RequestRefused
from copyengine.wire.logs import Lines
from scheduler.protocol import Choice, Failed, Finished, Timing, Usage
from scheduler.request_log import log_end, log_refused, log_unaccepted
from tests.log_lines import parse

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
FIGURES = (
    "n=1 prompt=120 cached=96 new=8 queued=0.0010 ttft=0.2500 tpot=0.01230 "
    "total=0.3400 demand_chunks=1 streamed_chunks=0 hits=900 misses=60 copied_mb=189.0"
)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def lines_of(*ends: tuple[str, Finished, Finished | Failed | None] | tuple[str, RequestRefused]) -> list[str]:
    """What is logged of them, from the event on."""
    logger, heard = logging.getLogger("scheduler.request_log"), Heard()
    logger.addHandler(heard)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        for end in ends:
            log_refused(*end) if len(end) == 2 else log_end(*end)
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    return [Lines("scheduler", False).format(record).partition(": ")[2] for record in heard.records]


def test_a_finished_request_says_what_it_took() -> None:
    """Word for word: what reads logs depends on it."""
    assert lines_of(("c0ffee", NOTHING, FINISHED)) == [f"event=request id=c0ffee end=length {FIGURES}"]


def test_one_that_failed_and_one_whose_client_left() -> None:
    failed = Failed("worker_failed", "it did not land")
    assert lines_of(("a", FINISHED, failed), ("a", FINISHED, None)) == [
        f'event=request id=a end=worker_failed {FIGURES} detail="it did not land"',
        f"event=request id=a end=left {FIGURES}",
    ]


def test_one_of_several_answers() -> None:
    several = replace(FINISHED, choices=[Choice("length", USAGE, FINISHED.timing)] * 3)
    assert " end=length n=3 prompt=120 " in lines_of(("a", NOTHING, several))[0]


def test_one_that_was_refused_and_words_that_may_be_the_clients() -> None:
    """The engine's own words stand in the line; those that may quote a request do not."""
    assert lines_of(
        ("", RequestRefused("queue_full", "2 requests wait already")),
        ("a", RequestRefused("invalid_grammar", "it says my secret")),
        ("b", RequestRefused("a_new_code", "my secret")),
        ("c", NOTHING, Failed("grammar_failed", "behind my secret")),
    ) == [
        'event=request id="" end=refused code=queue_full detail="2 requests wait already"',
        "event=request id=a end=refused code=invalid_grammar",
        "event=request id=b end=refused code=a_new_code",
        f"event=request id=c end=grammar_failed {FIGURES_OF_NOTHING}",
    ]


FIGURES_OF_NOTHING = (
    "n=1 prompt=0 cached=0 new=0 queued=0.0000 ttft=0.0000 tpot=0.00000 "
    "total=0.0000 demand_chunks=0 streamed_chunks=0 hits=0 misses=0 copied_mb=0.0"
)


@given(st.text(max_size=128))
def test_no_name_that_a_client_chooses_breaks_the_line_or_adds_to_it(request_id: str) -> None:
    """Read back by the rule that the log states."""
    (text,) = lines_of((request_id, NOTHING, None))
    assert len(text.splitlines()) == 1 and text.isascii() and text.isprintable()
    line = parse(f"2026-01-01 00:00:00,000 INFO scheduler x: {text}")
    assert line and line.event == "request" and (line.fields["id"], line.fields["end"]) == (request_id, "left")
    assert list(line.fields)[2:] == [pair.partition("=")[0] for pair in FIGURES.split()]


def test_nothing_is_written_where_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    def three() -> None:
        log_end("a", NOTHING, FINISHED)
        log_refused("a", RequestRefused("draining", "it stops"))
        log_unaccepted("a", "left")

    with caplog.at_level(logging.WARNING, "scheduler.request_log"):
        three()
    assert not caplog.records
    with caplog.at_level(logging.INFO, "scheduler.request_log"):
        three()
    assert [record.getMessage().split()[2] for record in caplog.records] == ["end=length", "end=refused", "end=left"]
