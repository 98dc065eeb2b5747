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
WARM_UP, BEFORE = 5, 10
"""Answers."""
RESTS = 5
"""Of REST_S each, an answer after each: as many first tokens after a rest."""
REST_S = 4.0
READY_S = 600.0


@dataclass(frozen=True)
class Idle:
    """Seconds of processor time by process over `wall_s` without a request; TTFTs, each of an answer of its own."""

    wall_s: float
    busy_s: dict[str, float]
    before_s: list[float]
    after_s: list[float]

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
    """Answers, then a rest without a client, then answers with a rest before each."""
    asked = prompts([PROMPT_TOKENS], WARM_UP + BEFORE + RESTS + 1, vocab_size)
    async with Client(engine.endpoint) as client:
        before = [await first_token_s(client, question) for question in asked[: WARM_UP + BEFORE]][WARM_UP:]
    found = processes(engine)
    await asyncio.sleep(1.0)
    start_s, then = time.perf_counter(), busy_s(found)
    await asyncio.sleep(IDLE_S)
    now, wall_s = busy_s(found), time.perf_counter() - start_s
    async with Client(engine.endpoint) as client:
        await client.health()  # so that connecting is not measured, as it was not before
        after = [await first_token_s(client, asked[WARM_UP + BEFORE])]
        for question in asked[WARM_UP + BEFORE + 1 :]:
            await asyncio.sleep(REST_S)
            after.append(await first_token_s(client, question))
    return Idle(wall_s, {name: now[name] - then[name] for name in now}, before, after)


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
        for name, times in (("before", found.before_s), ("after", found.after_s))
    ]
    return "\n\n".join(
        (
            report.table([f"process, idle for {found.wall_s:.0f} s", "% of one core"], shares),
            report.table(["first token", "answers", "median ms", "range ms"], first),
            f"Answers one after the other to {PROMPT_TOKENS} random tokens, {NEW_TOKENS} new ones each; after: the first "
            f"one after the {IDLE_S:.0f} s,\n"
            f"and {RESTS} with a rest of {REST_S:.0f} s before each.",
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
