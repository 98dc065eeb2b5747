"""Mixed load for a long time, then a rest: `python -m tests.bench.bench_soak --minutes 60 --out FILE`.

Clients by ZMQ and HTTP ask short, long and shared prompts, drawn in every way there is, streamed and not; some abort,
break off or vanish, some send what must be refused, and now and then far more come at once than there is room for.
`--kill N` kills a process every N minutes. What follows `--` goes to launch.py:
`python -m tests.bench.bench_soak --minutes 60 --out FILE --device cuda -- --model DIR`.

The marks, of which one that is missed makes the exit code 1:
- What each client saw, the log's lines of requests and the counters agree exactly, and nothing is held at the end.
- No control prompt is answered otherwise than at the start (but for near ties, which are counted).
- No figure of a process that has lived for ten minutes surely grows: the 95 % bound of a line fitted through the second
  half stays under what is allowed (soak_samples.py); files and threads are as before the load.
- The processes together take less than 5 % of a core in the rest.
"""

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from copyengine.checkpoint.builtin import ensure_builtin
from copyengine.checkpoint.model import open_model
from tests.bench import report
from tests.bench.asking import launched
from tests.bench.plot_soak import plot
from tests.bench.soak import FLAGS, Plan, Soaked, soak
from tests.bench.soak_acts import Sizes
from tests.bench.soak_samples import Series, slope

READY_S = 600.0
SCALES = {"private": 1e6, "pss": 1e6, "shm": 1e6, "gpu": 1e6}
"""Figures in bytes are shown in MB."""


def text_of(done: Soaked, plan: Plan) -> str:
    """All tables, and every mark that was missed."""
    stats, ledger = done.stats, done.ledger
    asked = [
        ["requests, as clients saw them", f"{len(ledger.asked):,}"],
        ["of these, refused by the HTTP front or left unsent", f"{len(ledger.asked) - done.ends.total():,}"],
        [
            "accepted = finished + failed + aborted",
            f"{stats.finished + stats.failed + stats.aborted:,} = "
            f"{stats.finished:,} + {stats.failed:,} + {stats.aborted:,}",
        ],
        ["refused", f"{stats.refused:,}"],
        ["prompt tokens, generated tokens", f"{stats.prompt_tokens:,}, {stats.generated_tokens:,}"],
        ["ends, by the log", ", ".join(f"{end} {count:,}" for end, count in sorted(done.ends.items()))],
        ["control answers, of these near ties", f"{ledger.controls:,}, {ledger.near_ties}"],
        ["processes killed, restarts counted", f"{done.kills}, {stats.restarts}"],
        ["idle, all processes, % of one core", f"{done.idle_percent:.2f}"],
    ]
    rows = [row for key, series in sorted(done.sampler.series.items()) if (row := _row(key[0], key[1], series))]
    head = ["process", "figure", "first", "last", "grown in the watched half", "at 95 %"]
    missed = "\n".join(f"- {failure}" for failure in done.failures) or "No mark was missed."
    return "\n\n".join(
        (
            f"Load for {plan.load_s / 60:.1f} minutes by {plan.users} users, a burst every {plan.burst_s:.0f} s, "
            f"then {plan.idle_s:.0f} s of rest.",
            report.table(["what", "how much"], asked),
            report.table(head, rows),
            missed,
        )
    )


def _row(name: str, figure: str, series: Series) -> list[str] | None:
    scale = SCALES.get(figure, 1.0)
    line = slope(series)
    if line is None:
        return None
    unit = " MB" if figure in SCALES else ""
    return [
        name,
        figure,
        f"{series.values[0] / scale:.1f}{unit}",
        f"{series.values[-1] / scale:.1f}{unit}",
        f"{line.growth / scale:+.2f}{unit}",
        f"{line.low / scale:+.2f} to {line.high / scale:+.2f}",
    ]


def keep(out: Path, text: str, done: Soaked) -> None:
    """Write the text, the samples beside it as JSON lines, and the plot if matplotlib is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for (name, figure, pid), series in sorted(done.sampler.series.items()):
            line = {"process": name, "figure": figure, "pid": pid, "at_s": series.at_s, "values": series.values}
            file.write(json.dumps(line) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(done.sampler.series, out.with_suffix(".png"))
        text += f"\n\n![Private memory of each process]({out.with_suffix('.png').name})"
    out.write_text(text + "\n", "utf-8")


def main(argv: Sequence[str]) -> int:
    """Print the tables; 1 if a mark was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file; samples and plot go beside it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="default: the built-in one")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--users", type=int, default=10, help="who ask all the time")
    parser.add_argument(
        "--kill", type=float, default=0.0, metavar="N", help="kill a process every N minutes, 2 or more"
    )
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of rest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="for launch.py")
    stated = parser.parse_args(argv)
    if 0 < stated.kill < 2:
        parser.error("--kill below 2: five deaths with less than a minute of service in between end the engine")
    model = [] if stated.model is None else ["--model", str(stated.model)]
    vocab_size = open_model(stated.model or ensure_builtin(), "{}", "auto").spec.vocab_size
    plan = Plan(
        load_s=60 * stated.minutes,
        idle_s=stated.idle,
        users=stated.users,
        kill_s=60 * stated.kill,
        seed=stated.seed,
        gpu=stated.device == "cuda",
    )
    flags = (*FLAGS, "--device", stated.device, "--workers", str(stated.workers), *model, *stated.flags)
    with launched(READY_S, *flags) as engine:
        done = asyncio.run(soak(engine, plan, Sizes(vocab_size)))
        if done.failures:
            print("\n".join(line for line in engine.errors[-2000:] if " ERROR " in line or " WARNING " in line))
    machine = f"{report.gpu_name()}, driver {report.gpu_driver()}" if plan.gpu else ""
    text = "\n\n".join(("# Soak", report.conditions(machine), text_of(done, plan)))
    print(text)
    if stated.out:
        keep(stated.out, text, done)
    return 1 if done.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
