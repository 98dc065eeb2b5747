"""The scheduler's own time for a token: a real process, clients on real sockets, and a model that takes none."""

import asyncio
import pstats
import queue
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from copyengine.wire.child import Child, Notices, Said
from copyengine.wire.lifecycle import Listening, Ready
from tests.bench.offered_load import Load, Served, offer
from tests.scheduler.rig import write_model

START_S = 60.0
FUNCTIONS = 16
"""Rows of a profile."""


@dataclass(frozen=True)
class Alone:
    """What it took: processor time of the whole scheduler process, its network thread included."""

    served: Served
    user_s: float
    system_s: float

    @property
    def token_us(self) -> float:
        """Microseconds of processor time for a token."""
        return 1e6 * (self.user_s + self.system_s) / self.served.load.tokens


@contextmanager
def started(
    directory: Path,
    vocab_size: int,
    profile: Path | None,
    step_ms: float = 0.0,
    max_model_len: int = 0,
    event_loop: str = "auto",
) -> Iterator[tuple[Child, str]]:
    """The scheduler, under cProfile if there is a file for it, and its endpoint. Its worker's steps take `step_ms`."""
    notices: Notices = queue.SimpleQueue()
    argv = ["--vocab-size", str(vocab_size), "--step-ms", str(step_ms)]
    children = [Child("worker", "tests.bench.instant_worker", argv, notices)]
    try:
        flags = ["--model", str(directory), "--workers", awaited(notices, "worker", Listening).endpoint, "--port", "0"]
        flags += ["--parent-pipe", "--max-running-requests", "256", "--max-queued-requests", "1024"]
        flags += ["--max-model-len", str(max_model_len), "--event-loop", event_loop]
        module, argv = "scheduler", [*flags, "--log-level", "warning"]
        if profile is not None:
            module, argv = "cProfile", ["-o", str(profile), "-m", "scheduler", *argv]
        children.append(Child("scheduler", module, argv, notices))
        endpoint = awaited(notices, "scheduler", Listening).endpoint
        awaited(notices, "scheduler", Ready)
        yield children[1], endpoint
    finally:
        for child in reversed(children):
            child.stop()


def awaited(notices: Notices, name: str, kind: type[Any]) -> Any:
    """The next event of that kind; AssertionError if the process ends instead, queue.Empty after START_S."""
    while True:
        match notices.get(timeout=START_S):
            case Said(name=sender, event=event) if sender == name and isinstance(event, kind):
                return event
            case Said():
                pass
            case other:
                raise AssertionError(f"{other} while waiting for {name}")


def measure(clients: int, answers: int, prompt_tokens: int, new_tokens: int, profile: Path | None = None) -> Alone:
    """All answers once to warm up with a few tokens each, then timed."""
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name))
        vocab_size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
        with started(directory, vocab_size, profile) as (scheduler, endpoint):
            asyncio.run(offer(endpoint, Load(clients, 1, prompt_tokens, 8, vocab_size)))
            process = psutil.Process(scheduler.pid)
            before = process.cpu_times()
            served = asyncio.run(offer(endpoint, Load(clients, answers, prompt_tokens, new_tokens, vocab_size), seed=1))
            after = process.cpu_times()
    return Alone(served, after.user - before.user, after.system - before.system)


def profiled(clients: int, answers: int, prompt_tokens: int, new_tokens: int) -> list[tuple[str, str, str]]:
    """Function, microseconds a token in it alone, and with what it calls: where most time goes, under cProfile."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "profile"
        tokens = measure(clients, answers, prompt_tokens, new_tokens, path).served.load.tokens
        return busiest(path, tokens)


def busiest(profile: Path, tokens: int) -> list[tuple[str, str, str]]:
    """The same of what cProfile wrote of any process that handled so many tokens."""
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    rows = sorted(((own, total, place) for place, (_, _, own, total, _) in stats.items()), reverse=True)
    busy = [row for row in rows if row[2][2] != "run"]  # the loop itself, waiting included
    return [(_name(place), f"{1e6 * own / tokens:.1f}", f"{1e6 * total / tokens:.1f}") for own, total, place in busy][
        :FUNCTIONS
    ]


def _name(place: tuple[str, int, str]) -> str:
    file, _, function = place
    if file == "~":
        return f"`{function.strip('<>')}`"
    return f"`{'/'.join(Path(file).parts[-2:])}: {function}`"
