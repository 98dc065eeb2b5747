"""A short soak: mixed load by ZMQ and HTTP with aborts, bursts and bad requests, then a rest.

What clients saw is checked against the log's lines and the engine's counters, control prompts against their first
answers, the processes against themselves before the load; the checks themselves against books and lines that are wrong.
"""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from copyengine.checkpoint.builtin import ensure_builtin
from copyengine.checkpoint.model import open_model
from scheduler.protocol import ModeCounters, StatsReply
from tests.bench.soak import FLAGS, Plan, soak
from tests.bench.soak_acts import Sizes
from tests.bench.soak_books import Asked, Line, mistakes
from tests.bench.soak_samples import ALLOWED, Series, growing, slope
from tests.e2e.engine import running
from tests.e2e.windows import CONDITIONS

LOAD_S, IDLE_S = 6.0, 4.0
ROOM = ("--max-running-requests", "4", "--max-queued-requests", "8")
"""Bursts fill it in less time."""


@pytest.mark.parametrize("event_loop", ["uvloop", pytest.param("selector", marks=pytest.mark.slow)])
def test_mixed_load_leaves_nothing_behind_and_adds_up(cache: Any, event_loop: str) -> None:
    """Slopes are the long one's: some seconds say nothing of them."""
    if event_loop == "uvloop":
        pytest.importorskip("uvloop")
    sizes = Sizes(open_model(ensure_builtin(), "{}", "auto").spec.vocab_size)
    plan = Plan(load_s=LOAD_S, idle_s=IDLE_S, users=6, burst=36, sample_s=1.0, burst_s=3.0, control_s=2.0)
    with running(*FLAGS, *ROOM, "--event-loop", event_loop, env={} if event_loop == "uvloop" else CONDITIONS) as engine:
        done = asyncio.run(soak(engine, plan, sizes))
    assert not done.failures, "\n".join([*done.failures, *engine.errors[-100:]])
    assert done.ledger.controls >= 3 and done.stats.finished and done.stats.aborted and done.stats.refused


def series_of(values: list[float]) -> Series:
    return Series([2.0 * i for i in range(len(values))], values)


def test_a_line_that_grows_is_found_and_noise_is_not() -> None:
    """Against lines whose slope is known."""
    draw = random.Random(1)
    noise = [100e6 + draw.gauss(0, 2e6) for _ in range(400)]
    late = [100e6 + min(i, 150) * 1e6 for i in range(400)]  # grows at the beginning alone
    leak = [value + i * 50e3 for i, value in enumerate(noise)]  # 10 MB in the watched half
    names = {("a", "private", 1): noise, ("b", "private", 2): late, ("c", "private", 3): leak}
    found = growing({key: series_of(values) for key, values in names.items()})
    assert len(found) == 1 and "of c" in found[0]
    line = slope(series_of(leak))
    assert line and 0 < line.low < line.growth < line.high and abs(line.growth - 200 * 50e3) < 2e6
    steps = series_of([10.0 + i // 100 for i in range(400)])
    assert len(growing({("d", "fds", 4): series_of([10.0] * 400), ("e", "threads", 5): steps})) == 0  # by one alone
    assert growing({("f", "fds", 6): series_of([10.0 + i // 20 for i in range(400)])})
    assert slope(series_of([1.0] * 10)) is None
    assert not growing({("g", "fds", 7): series_of([10.0 + i for i in range(200)])}), "it has not lived long enough"
    assert set(ALLOWED) >= {"private", "fds", "threads", "shm", "gpu"}


ASKED = [
    Asked("zmq", "a", "ended", "length", 5),
    Asked("http", "b-0", "ended", "", 3),
    Asked("zmq", "c", "left", "", 2),
    Asked("http", "", "left"),
    Asked("zmq", "e", "error", "queue_full"),
    Asked("http", "f-0", "error", "invalid_request"),
    Asked("zmq", "g", "left", "", 0, delivered=False),
]
LINES = [
    Line("a", "length", 10, 5),
    Line("b-0", "stop", 10, 3),
    Line("c", "abort", 10, 2),
    Line("d-0", "left", 10, 1),
    Line("e", "refused", 0, 0),
]


def counters(**changed: int) -> StatsReply:
    none = ModeCounters()
    said: dict[str, Any] = dict.fromkeys(StatsReply.__struct_fields__, 0)
    said |= {"finished": 2, "aborted": 2, "refused": 1, "prompt_tokens": 40, "generated_tokens": 11}
    modes: dict[str, Any] = {"decode": none, "demand": none, "streamed": none, "workers": []}
    return msgspec.convert(said | modes | changed, StatsReply, from_attributes=True)


def test_books_that_add_up_have_no_mistakes() -> None:
    assert mistakes(ASKED, LINES, counters(), kills=False) == []


@pytest.mark.parametrize(
    "asked, lines, stats",
    [
        (ASKED, LINES[1:], counters(finished=1, prompt_tokens=30)),  # a request without a line
        (ASKED, [*LINES, LINES[0]], counters(finished=3, prompt_tokens=50)),  # one with two
        (ASKED, [*LINES, Line("z", "stop", 0, 0), Line("y", "stop", 0, 0)], counters(finished=4)),  # nobody's
        (ASKED, [Line("a", "length", 10, 6), *LINES[1:]], counters()),  # another number of tokens
        (ASKED, [Line("a", "stop", 10, 5), *LINES[1:]], counters()),  # another end
        (ASKED, [LINES[0], Line("b-0", "abort", 10, 3), *LINES[2:]], counters(finished=1, aborted=3)),
        (ASKED, LINES, counters(finished=3)),
        (ASKED, LINES, counters(failed=1)),
        (ASKED, LINES, counters(prompt_tokens=41)),
        (ASKED, LINES, counters(generated_tokens=9)),
        (ASKED, LINES, counters(generated_tokens=12)),
        (ASKED, LINES, counters(running=1)),
        (ASKED, LINES, counters(kv_pages_total=1)),
        ([*ASKED, Asked("http", "", "lost", "reset")], LINES, counters()),
    ],
)
def test_each_mistake_in_the_books_is_found(asked: list[Asked], lines: list[Line], stats: StatsReply) -> None:
    assert mistakes(asked, lines, stats, kills=False)
