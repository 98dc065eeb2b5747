"""What the HTTP front adds to the ZMQ client: `python -m tests.bench.bench_http --keep`; needs `.[test]` for openai.

The model's time is taken out: a worker process answers each step at once, or after a sleep. The mark: under 200 us of
the front's processor time for a token of 64 streams. Of every figure the least of `--repeats` is told.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import openai

from tests.bench import report
from tests.bench.front_alone import MODEL, Rig, Taken, by_http, by_zmq, rig, taken
from tests.bench.http_load import body_of
from tests.bench.offered_load import Load, Served, percentiles
from tests.bench.scheduler_alone import busiest

STREAMS = (1, 8, 64)
ANSWERS = {1: 4, 8: 4, 64: 2}
"""Of each stream, one after the other."""

PROMPT_TOKENS, NEW_TOKENS = 32, 128
STEP_MS = 10.0
"""Slow enough that two cores keep up with 64 streams, so that each token is an event of its own."""

REQUESTS = 512
"""Answers of one token each."""

Way = Callable[[Rig, Load, int], Taken]


def least(way: Way, rig: Rig, load: Load, repeats: int) -> Taken:
    """That of several goes which took the front the least processor time, or without it who asked."""
    goes = [way(rig, load, 100 * i) for i in range(repeats)]
    return min(goes, key=lambda go: (go.front_us, go.client_us) if way is not by_zmq else (0.0, go.served.wall_s))


def tokens_part(repeats: int, flags: Sequence[str] = (), streams: Sequence[int] = STREAMS) -> list[tuple[Taken, Taken]]:
    """At each number of streams by ZMQ and by HTTP, with a step of STEP_MS."""
    found = []
    with rig(STEP_MS, flags) as started:
        by_http(started, Load(8, 1, PROMPT_TOKENS, 8, started.vocab_size))
        for count in streams:
            load = Load(count, ANSWERS[count], PROMPT_TOKENS, NEW_TOKENS, started.vocab_size)
            found.append((least(by_zmq, started, load, 1), least(by_http, started, load, repeats)))
            print(" ".join(token_row(*found[-1])), flush=True)
    return found


def token_row(zmq: Taken, http: Taken) -> list[str]:
    """One line of the table."""
    tokens = http.served.load.tokens
    return [
        str(http.served.load.clients),
        str(tokens),
        f"{http.served.pieces / tokens:.2f}",
        f"{http.front_us:.0f}",
        f"{1e6 * http.front_user_s / tokens:.0f} / {1e6 * http.front_system_s / tokens:.0f}",
        f"{http.client_us:.0f}",
        f"{zmq.client_us:.0f}",
    ]


def requests_part(repeats: int) -> list[list[str]]:
    """Answers of one token, as fast as they come."""
    rows = []
    with rig(0.0) as started:
        for count in STREAMS:
            load = Load(count, REQUESTS // count, PROMPT_TOKENS, 1, started.vocab_size)
            by_http(started, load)
            zmq, http = (least(way, started, load, repeats) for way in (by_zmq, by_http))
            ttft = [1e3 * percentiles(each.served.ttft_s)[0] for each in (zmq, http)]
            rows.append([str(count), f"{http.front_us:.0f}", *(f"{ms:.2f}" for ms in (*ttft, ttft[1] - ttft[0]))])
            print(" ".join(rows[-1]), flush=True)
    return rows


def saturated_part(repeats: int) -> list[list[str]]:
    """Long answers, as fast as they come."""
    rows = []
    with rig(0.0) as started:
        for count in STREAMS:
            load = Load(count, 2 * ANSWERS[count], PROMPT_TOKENS, NEW_TOKENS, started.vocab_size)
            by_http(started, load)
            fastest = [
                min((way(started, load, i) for i in range(repeats)), key=lambda go: go.served.wall_s)
                for way in (by_zmq, by_http)
            ]
            walls = [1e6 / go.served.tokens_per_s for go in fastest]
            rows.append(
                [str(count), *(f"{wall:.0f}" for wall in walls), f"{fastest[1].served.pieces / load.tokens:.2f}"]
            )
            print(" ".join(rows[-1]), flush=True)
    return rows


def by_openai(rig: Rig, load: Load, seed: int = 0) -> Taken:
    """Through the front, by the openai client."""
    return taken(rig, _offer_openai(rig.port, load, seed))


async def _offer_openai(port: int, load: Load, seed: int) -> Served:
    served = Served(load)
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=300) as client:
        start_s = time.perf_counter()
        await asyncio.gather(*(_converse(client, load, seed + i, served) for i in range(load.clients)))
        served.wall_s = time.perf_counter() - start_s
    return served


async def _converse(client: openai.AsyncOpenAI, load: Load, seed: int, served: Served) -> None:
    draw = random.Random(seed)
    for _ in range(load.answers):
        body = body_of(draw, load, seed)
        extra = {"ignore_eos": body.pop("ignore_eos")}
        async for event in await client.completions.create(model=MODEL, extra_body=extra, **body):
            served.pieces += bool(event.choices and event.choices[0].finish_reason is None)


def openai_part(repeats: int) -> list[list[str]]:
    """What the openai client takes for itself."""
    rows = []
    with rig(STEP_MS) as started:
        for count in STREAMS[1:]:
            load = Load(count, 1, PROMPT_TOKENS, NEW_TOKENS, started.vocab_size)
            by_openai(started, Load(4, 1, PROMPT_TOKENS, 8, started.vocab_size))
            goes = [by_openai(started, load, i) for i in range(repeats)]
            rows.append(
                [str(count), f"{min(go.client_us for go in goes):.0f}", f"{min(go.front_us for go in goes):.0f}"]
            )
            print(" ".join(rows[-1]), flush=True)
    return rows


def profile_part() -> list[tuple[str, str, str]]:
    """Where the front's time goes at most streams."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "profile"
        with rig(STEP_MS, profile=path) as started:
            load = Load(STREAMS[-1], 4, PROMPT_TOKENS, NEW_TOKENS, started.vocab_size)
            by_http(started, load)
        return busiest(path, load.tokens)


def text_of(repeats: int) -> str:
    """The whole result file."""
    loads = [os.getloadavg()[0]] if hasattr(os, "getloadavg") else []
    tokens = tokens_part(repeats)
    ((_, selector),) = tokens_part(repeats, ["--event-loop", "selector"], STREAMS[-1:])
    single, saturated, by_client = requests_part(repeats), saturated_part(repeats), openai_part(repeats)
    loads += [os.getloadavg()[0]] if loads else []
    shared = f"- load average of the machine, which others used too: {' to '.join(f'{load:.1f}' for load in loads)}"
    head = [
        "streams",
        "tokens",
        "events a token",
        "front us/token",
        "user / system",
        "reader us/token",
        "ZMQ client us/token",
    ]
    return "\n\n".join(
        (
            "# What HTTP adds",
            f"{report.conditions(packages=PACKAGES)}\n{shared}",
            "Worker, scheduler, front and who asks are processes of their own. Streamed completions of "
            f"{PROMPT_TOKENS} token ids; by ZMQ the same\nprompts and lengths. Of {repeats} goes the one that took the "
            "front's process the least processor time, its network threads\nincluded.",
            "## A token",
            report.table(head, [token_row(*each) for each in tokens]),
            f"A step takes {STEP_MS:g} ms, asleep. The reader is the benchmark's own client, which only counts events; "
            "ZMQ clients have\na connection for each stream, and take their time in the process that asks. "
            f"On the selector loop the front takes\n{selector.front_us:.0f} us/token at {STREAMS[-1]} streams.",
            "## A request",
            report.table(["streams", "front us/request", "TTFT by ZMQ ms", "TTFT by HTTP ms", "added ms"], single),
            f"{REQUESTS} answers of one token; the model takes no time. p50.",
            "## As fast as two cores can",
            report.table(["streams", "ZMQ us/token", "HTTP us/token", "events a token"], saturated),
            "Wall time over all streams; the model takes no time, so that all processes compete for the cores. Tokens "
            "that\ncome while the front is busy share an event.",
            "## The openai client",
            report.table(["streams", "client us/token", "front us/token"], by_client),
            f"Its own processor time, which is the client's to pay; a step takes {STEP_MS:g} ms.",
            "## Where it goes",
            report.table(["function", "alone", "with calls"], profile_part()),
            f"Microseconds a token of {STREAMS[-1]} streams, under cProfile, which makes every call dearer.",
        )
    )


PACKAGES = ("uvicorn", "httptools", "starlette", "uvloop", "pyzmq", "msgspec", "openai")


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write the result file")
    stated = parser.parse_args(argv)
    text = text_of(stated.repeats)
    print(text)
    if stated.keep:
        print(report.keep("http", text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
