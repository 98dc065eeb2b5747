"""Many clients at once: `python -m tests.bench.bench_load --keep`; needs `pip install -e '.[bench]'`.

Three parts, each alone by `--part`: `load`, an engine under 1 to 256 clients; `scheduler`, the scheduler's own time for
a token with the model's time taken out; `hop`, how mini-sglang passes a token on. What follows `--` goes to launch.py:
`python -m tests.bench.bench_load --part load -- --device cuda --model DIR`.
"""

import argparse
import asyncio
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from copyengine.checkpoint.builtin import ensure_builtin
from copyengine.checkpoint.model import open_model
from tests.bench import msgpack_hop, report, scheduler_alone
from tests.bench.asking import launched
from tests.bench.offered_load import Load, Served, offer, percentiles
from tests.bench.plot_load import plot
from tests.e2e.engine import Engine

CLIENTS = (1, 8, 64, 256)
REQUESTS = 64
"""At each load at least."""
PROMPT_TOKENS, NEW_TOKENS = 32, 16
READY_S = 600.0
ALONE_CLIENTS, ALONE_ANSWERS, ALONE_NEW_TOKENS = 64, 4, 256
HOP_STEPS = 1000
FLAGS = ("--max-running-requests", "64", "--max-queued-requests", "1024", "--log-level", "warning")


# An engine under load -----------------------------------------------------------------------------------------------


def scheduler_of(engine: Engine) -> psutil.Process:
    """Its scheduler's process."""
    return next(child for child in engine.children() if "scheduler" in child.cmdline())


def under_load(flags: Sequence[str]) -> list[tuple[Served, float]]:
    """What was served at each load, and the scheduler's processor seconds in it."""
    model = next((Path(b) for a, b in itertools.pairwise(flags) if a == "--model"), None)
    vocab_size = open_model(model or ensure_builtin(), "{}", "auto").spec.vocab_size
    found = []
    with launched(READY_S, *FLAGS, *flags) as engine:
        process = scheduler_of(engine)
        asyncio.run(offer(engine.endpoint, Load(8, 1, PROMPT_TOKENS, NEW_TOKENS, vocab_size)))
        for clients in CLIENTS:
            load = Load(clients, max(1, REQUESTS // clients), PROMPT_TOKENS, NEW_TOKENS, vocab_size)
            before = process.cpu_times()
            served = asyncio.run(offer(engine.endpoint, load, seed=1000 * clients))
            after = process.cpu_times()
            found.append((served, after.user + after.system - before.user - before.system))
            print(" ".join(load_row(*found[-1])), flush=True)
    return found


def load_row(served: Served, scheduler_s: float) -> list[str]:
    """One line of the table."""
    ttft, tpot = percentiles(served.ttft_s), percentiles(served.tpot_s)
    return [
        str(served.load.clients),
        str(len(served.ttft_s)),
        f"{served.requests_per_s:.1f}",
        f"{served.tokens_per_s:.0f}",
        f"{1e3 * ttft[0]:.0f} / {1e3 * ttft[1]:.0f}",
        f"{1e3 * tpot[0]:.1f} / {1e3 * tpot[1]:.1f}",
        f"{1e6 * scheduler_s / served.load.tokens:.0f}",
    ]


def load_part(flags: Sequence[str], keep: bool) -> str:
    """The table, and the plot beside the result file."""
    found = under_load(flags)
    head = [
        "clients",
        "requests",
        "requests/s",
        "tokens/s",
        "TTFT p50 / p99 ms",
        "TPOT p50 / p99 ms",
        "scheduler us/token",
    ]
    text = "## An engine under load\n\n" + report.table(head, [load_row(*each) for each in found])
    text += (
        "\n\nEvery client has a connection of its own and asks again when it has its answer: "
        f"{PROMPT_TOKENS} random prompt tokens,\n{NEW_TOKENS} sampled new ones. "
        f"`launch.py {' '.join([*FLAGS, *flags])}`."
    )
    if keep:
        picture = report.path_of("load").with_suffix(".png")
        plot([served for served, _ in found], "Time to first token under load", picture)
        text += f"\n\n![TTFT over load]({picture.name})"
    return text


# The scheduler alone ------------------------------------------------------------------------------------------------


def scheduler_part() -> str:
    """Its time for a token, and where it goes."""
    alone = scheduler_alone.measure(ALONE_CLIENTS, ALONE_ANSWERS, PROMPT_TOKENS, ALONE_NEW_TOKENS)
    served = alone.served
    tokens = served.load.tokens
    row = [
        str(ALONE_CLIENTS),
        str(tokens),
        f"{served.tokens_per_s:.0f}",
        f"{alone.token_us:.1f}",
        f"{1e6 * alone.user_s / tokens:.1f}",
        f"{1e6 * alone.system_s / tokens:.1f}",
    ]
    head = ["clients", "tokens", "tokens/s", "us/token", "of it user", "of it system"]
    profile = scheduler_alone.profiled(ALONE_CLIENTS, ALONE_ANSWERS, PROMPT_TOKENS, ALONE_NEW_TOKENS)
    return "\n\n".join(
        (
            "## The scheduler alone",
            report.table(head, [row]),
            "Processor time of the whole scheduler process, ZeroMQ's thread included, while a worker process answers\n"
            "each step at once. A reply goes out for each token of each client.",
            "Where it goes, under cProfile, which makes every call dearer: microseconds a token in the function\n"
            "alone, and with what it calls. The process's start is in it.",
            report.table(["function", "alone", "with calls"], profile),
        )
    )


# mini-sglang's hop --------------------------------------------------------------------------------------------------


def hop_part() -> str:
    """Its time for a token in three processes."""
    hop = msgpack_hop.measure(ALONE_CLIENTS, HOP_STEPS)
    row = [
        str(ALONE_CLIENTS),
        f"{hop.tokens_per_s:.0f}",
        f"{hop.sender_us:.1f}",
        f"{hop.detokenizer_us:.1f}",
        f"{hop.receiver_us:.1f}",
        f"{hop.sender_us + hop.detokenizer_us + hop.receiver_us:.1f}",
    ]
    head = ["requests", "tokens/s", "scheduler us/token", "detokenizer us/token", "API server us/token", "in all"]
    return "\n\n".join(
        (
            "## The same hop as mini-sglang makes it",
            report.table(head, [row]),
            "Its message classes and sockets rebuilt (tests/bench/msgpack_hop.py), a batch of messages for each step:\n"
            "packing, sending, unpacking and waking alone, without scheduling, detokenising or HTTP. Of these the\n"
            "scheduler's figure above includes the first two, and a message for each token where here a batch is one.",
        )
    )


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "load": lambda stated: load_part(stated.flags, stated.keep),
    "scheduler": lambda stated: scheduler_part(),
    "hop": lambda stated: hop_part(),
}


def main(argv: Sequence[str]) -> int:
    """Print the tables; with --keep write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--keep", action="store_true", help="write results/ (all parts) and the plot")
    parser.add_argument("flags", nargs="*", help="for launch.py")
    stated = parser.parse_args(argv)
    names = list(PARTS) if stated.part == "all" else [stated.part]
    needed = ["msgpack"] * ("hop" in names) + ["matplotlib"] * (stated.keep and "load" in names)
    for package in needed:  # before minutes of measuring
        importlib.import_module(package)
    text = "\n\n".join(("# Load", report.conditions(), *(PARTS[name](stated) for name in names)))
    print(text)
    if stated.keep:
        print(report.keep("load" if stated.part == "all" else f"load-{stated.part}", text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
