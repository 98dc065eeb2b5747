"""An engine that nobody asks: processor time of all its processes, and the first token after a rest.

`python -m tests.bench.bench_idle --keep`; what follows `--` goes to launch.py. The marks: under 5 % of one core over
20 s, and a first token as fast as before the rest.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from copyengine.checkpoint.builtin import ensure_builtin
from copyengine.checkpoint.model import open_model
from scheduler.client import Client
from tests.bench import report
from tests.bench.asking import Question, ask, launched, prompts
from tests.e2e.engine import Engine

IDLE_S = 20.0
MARK_PERCENT = 5.0
PROMPT_TOKENS, NEW_TOKENS = 16, 8
WARM_UP = 5
"""Answers."""
RESTS = 8
REST_S = 4.0
READY_S = 600.0


@dataclass(frozen=True)
class Idle:
    """Seconds of processor time by process over `wall_s` without a request; TTFTs, each of an answer of its own."""

    wall_s: float
    busy_s: dict[str, float]
    rested_s: list[float]  # the first after a rest
    unrested_s: list[float]  # right after another answer

    @property
    def percent(self) -> float:
        """Of one core, all processes together."""
        return 100 * sum(self.busy_s.values()) / self.wall_s


def processes(engine: Engine) -> dict[str, psutil.Process]:
    """launch.py and its children, by what they are."""
    found = {"launch.py": psutil.Process(engine.process.pid)}
    for child in engine.children():
        argv = child.cmdline()
        if "-m" not in argv:
            continue
        module = argv[argv.index("-m") + 1]
        name = next((flag.split("=", 1)[1] for flag in argv if flag.startswith("--name=")), module)
        found[name] = child
    return found


def busy_s(found: dict[str, psutil.Process]) -> dict[str, float]:
    """Processor seconds so far."""
    times = {name: process.cpu_times() for name, process in found.items()}
    return {name: each.user + each.system for name, each in times.items()}


async def first_token_s(client: Client, question: Question) -> float:
    """As its client sees it."""
    return (await ask(client, question[1], NEW_TOKENS)).ttft_s


async def measure(engine: Engine, vocab_size: int) -> Idle:
    """A rest without a client; then short rests with two answers behind each, of which the second did not rest.

    In turns, so that whatever else the machine does hits both.
    """
    asked = iter(prompts([PROMPT_TOKENS], WARM_UP + 2 * (RESTS + 1), vocab_size))
    found = processes(engine)
    async with Client(engine.endpoint) as client:
        for _ in range(WARM_UP):
            await first_token_s(client, next(asked))
    await asyncio.sleep(1.0)
    start_s, then = time.perf_counter(), busy_s(found)
    await asyncio.sleep(IDLE_S)
    now, wall_s = busy_s(found), time.perf_counter() - start_s
    rested, busy = list[float](), list[float]()
    async with Client(engine.endpoint) as client:
        for turn in range(RESTS + 1):
            await asyncio.sleep(REST_S if turn else 0.0)
            rested.append(await first_token_s(client, next(asked)))
            busy.append(await first_token_s(client, next(asked)))
    return Idle(wall_s, {name: now[name] - then[name] for name in now}, rested, busy)


def text_of(found: Idle) -> str:
    """Both tables."""
    shares = [[name, f"{100 * seconds / found.wall_s:.2f}"] for name, seconds in found.busy_s.items()]
    shares.append(["all together", f"{found.percent:.2f}"])
    first = [
        [
            name,
            str(len(times)),
            f"{1e3 * statistics.median(times):.1f}",
            f"{1e3 * min(times):.1f}-{1e3 * max(times):.1f}",
        ]
        for name, times in (("after a rest", found.rested_s), ("without", found.unrested_s))
    ]
    return "\n\n".join(
        (
            report.table([f"process, idle for {found.wall_s:.0f} s", "% of one core"], shares),
            report.table(["first token", "answers", "median ms", "range ms"], first),
            f"Answers of {NEW_TOKENS} tokens to {PROMPT_TOKENS} random ones. The rests: the {IDLE_S:.0f} s, then\n"
            f"{RESTS} of {REST_S:.0f} s; after each, one answer that follows the rest and one that follows the answer.",
        )
    )


def main(argv: Sequence[str]) -> int:
    """Print the tables; 1 if the engine was not idle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write results/")
    parser.add_argument("--model", type=Path, default=None, help="default: the built-in one")
    parser.add_argument("flags", nargs="*", help="for launch.py")
    stated = parser.parse_args(argv)
    flags = [*stated.flags, *(["--model", str(stated.model)] if stated.model else [])]
    vocab_size = open_model(stated.model or ensure_builtin(), "{}", "auto").spec.vocab_size
    with launched(READY_S, "--log-level", "warning", *flags) as engine:
        found = asyncio.run(measure(engine, vocab_size))
    text = "\n\n".join(("# Idle", report.conditions(), text_of(found)))
    print(text)
    if stated.keep:
        print(report.keep("idle", text))
    return 0 if found.percent < MARK_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
