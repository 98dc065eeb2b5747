"""Time to first token over the prompt's length: every chunk streamed against every chunk on demand.

An engine for each threshold in turn, each asked the same prompts through the real client; a prompt's answer must be the
same from all. `python -m tests.bench.bench_ttft --keep` does it on the CPU, with a random model, and writes the result
file. `python -m tests.bench.bench_ttft --synthetic flash-next --out ttft.md` does it on a GPU in Flash-Next's geometry,
with made-up weights, and measures decoding too: a line of JSON for each launch is added to ttft.jsonl as it comes, and
the tables are made of all lines there, so that `--thresholds` can be spread over several calls.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from tests.bench import plot_ttft, report, ttft_arms
from tests.bench.asking import WARM_UP_TOKENS, Question, ask, decode, launched, prompts, touch
from tests.bench.flash_next import write_flash_next
from tests.bench.ttft_arms import Arm, Decoding, Prompt
from tests.bench.ttft_tables import tables
from tests.e2e.engine import Engine, running

SIZES = Sizes(
    layers=12, hidden=512, intermediate=512, experts=128, experts_per_token=8, heads=8, kv_heads=2, head_dim=64
)
"""2.4 GB of bfloat16 experts in 12 layers of 128."""
SLOTS = 384
LENGTHS = (1, 4, 16, 64, 128, 256, 512)
REPEATS = 5
WARM_UP = 3
NEW_TOKENS = 8

FLASH_NEXT_SLOTS = 2100
FLASH_NEXT_REPEATS = 3
FLASH_NEXT_NEW_TOKENS = 16
THRESHOLDS = (512, 0, 4096)
"""The one that matters most first, should time run out."""
BATCHES = (1, 2, 4, 8)
WHOLE_PROMPTS = ("--disable-prefix-cache",)
"""A prompt that was the warm-up's too is computed again."""


TITLE = "# Time to first token: streamed against demand prefill"
NOTES = f"""Medians over the repeats, the range of TTFT in brackets. Copied bytes and loaded experts are the prefill's
alone, by the engine's counters; an answer is {NEW_TOKENS} greedy tokens. The model: {SIZES.layers} layers,
E {SIZES.experts}, K {SIZES.experts_per_token}, H {SIZES.hidden}, I {SIZES.intermediate}, bfloat16; {SLOTS} slots.
Weights and prompts are random, so that routing is nearly uniform. On the host backend a copy is a memcpy that shares
cores and memory bandwidth with the computation: the table shows what demand prefill saves there, not what it saves on
a GPU's link."""


# A random model on the CPU ------------------------------------------------------------------------------------------


async def ask_all(engine: Engine, questions: list[Question]) -> list[Prompt]:
    """All answers, one after the other, after some that are thrown away."""
    async with Client(engine.endpoint) as client:
        for _ in range(WARM_UP):
            await ask(client, questions[-1][1], NEW_TOKENS)
        return [await ask(client, ids, NEW_TOKENS) for _, ids in questions]


def measure(model: Path, demand_tokens: int, questions: list[Question]) -> list[Prompt]:
    """One arm."""
    flags = ("--slots", str(SLOTS), "--demand-tokens", str(demand_tokens), *WHOLE_PROMPTS)
    with running("--model", str(model), *flags) as engine:
        return asyncio.run(ask_all(engine, questions))


def row(length: int, streamed: list[Prompt], demand: list[Prompt]) -> list[str]:
    """One line of the table: medians, and the spread of TTFT."""

    def cells(answers: list[Prompt]) -> list[str]:
        ttft_ms = sorted(1e3 * answer.scheduler_ttft_s for answer in answers)
        return [
            f"{statistics.median(ttft_ms):.0f} ({ttft_ms[0]:.0f}-{ttft_ms[-1]:.0f})",
            f"{statistics.median(answer.copied_nbytes for answer in answers) / 1e6:.0f}",
            f"{statistics.median(answer.misses for answer in answers):.0f}",
        ]

    equal = sum(a.answer == b.answer for a, b in zip(streamed, demand, strict=True))
    return [str(length), *cells(streamed), *cells(demand), f"{equal} of {len(streamed)}"]


def random_model(stated: argparse.Namespace) -> int:
    """Print the table; 1 if any answer differs between the arms."""
    lengths = numbers(stated.lengths) or list(LENGTHS)
    questions = prompts(lengths, stated.repeats or REPEATS, SIZES.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), SIZES)
        arms = [measure(Path(directory), threshold, questions) for threshold in (0, max(lengths))]
    rows = []
    for length in lengths:
        mine = [i for i, (n, _) in enumerate(questions) if n == length]
        rows.append(row(length, *([arm[i] for i in mine] for arm in arms)))
    head = ["prompt tokens"]
    head += [f"{arm}: {what}" for arm in ("streamed", "demand") for what in ("TTFT ms", "MB copied", "experts loaded")]
    text = "\n\n".join((TITLE, report.conditions(), report.table([*head, "same answer"], rows), NOTES))
    print(text)
    if stated.keep:
        print(f"kept in {report.keep('ttft', text)}")
    return 0 if all(a.answer == b.answer for a, b in zip(*arms, strict=True)) else 1


# Flash-Next's geometry ----------------------------------------------------------------------------------------------


def flash_next(stated: argparse.Namespace) -> int:
    """Launch for each threshold, print the tables; 1 if a launch failed or an answer differs between thresholds."""
    start = time.monotonic()
    out = stated.out or report.path_of("flash-next_ttft", report.gpu_name())
    out.parent.mkdir(parents=True, exist_ok=True)
    lines, failed, longest = out.with_suffix(".jsonl"), False, 0.0
    if stated.touch_gib:
        touch(stated.touch_gib)
        print(f"memory touched [{time.monotonic() - start:.0f} s]", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        sizes = write_flash_next(Path(directory), stated.layers, stated.vocab, stated.small)
        for threshold in numbers(stated.thresholds) or THRESHOLDS:
            begun = time.monotonic()
            if begun + longest > start + stated.limit_s:
                print(f"threshold {threshold}: no time left for it", flush=True)
                continue
            try:
                ttft_arms.append(lines, arm(Path(directory), sizes, threshold, stated))
                out.write_text(tables(ttft_arms.read(lines), stated.report_distinct), "utf-8")
            except (AssertionError, SlotstreamError, OSError) as error:  # the other thresholds are worth having
                failed = True
                print(f"threshold {threshold} failed: {type(error).__name__}: {error}", flush=True)
            longest = max(longest, time.monotonic() - begun)
            print(f"[{time.monotonic() - start:.0f} s]", flush=True)
    arms = ttft_arms.read(lines)
    print(tables(arms, stated.report_distinct))
    if arms:
        picture(arms, lines)
    equal, shared = ttft_arms.equal_answers(arms)
    return 1 if failed or equal < shared else 0


def arm(model: Path, sizes: Sizes, threshold: int, stated: argparse.Namespace) -> Arm:
    """One launch and all that it is asked."""
    device = stated.device or ("cpu" if stated.small else "cuda")
    batches = numbers(stated.decode) or list(BATCHES)
    if threshold not in numbers(stated.decode_in):
        batches = []
    slots = stated.slots or (sizes.experts if stated.small else FLASH_NEXT_SLOTS)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", device, "--slots", str(slots)]
    flags += ["--demand-tokens", str(threshold), "--max-running-requests", str(max(BATCHES)), *WHOLE_PROMPTS]
    flags += stated.flag
    begun = time.monotonic()
    with launched(stated.ready_s, *flags) as engine:
        ready_s = time.monotonic() - begun
        print(f"threshold {threshold}: ready in {ready_s:.0f} s; {engine.fact('workers')}", flush=True)
        answers, decodings = asyncio.run(_measured(engine, sizes, batches, stated))
    gpu = report.gpu_name() if device == "cuda" else ""
    return Arm(
        demand_tokens=threshold,
        model=f"Flash-Next's geometry, H {sizes.hidden}, I {sizes.intermediate}, K {sizes.experts_per_token}",
        layers=sizes.layers,
        experts=sizes.experts,
        slots=slots,
        device=gpu or report.cpu_name(),
        conditions=report.gpu_conditions(gpu) if gpu else report.conditions(),
        ready_s=ready_s,
        prompts=answers,
        decodings=decodings,
    )


async def _measured(
    engine: Engine, sizes: Sizes, batches: Sequence[int], stated: argparse.Namespace
) -> tuple[list[Prompt], list[Decoding]]:
    lengths = numbers(stated.lengths) or list(ttft_arms.PUBLISHED_TOKENS)
    repeats = stated.repeats or FLASH_NEXT_REPEATS
    answers: list[Prompt] = []
    decodings: list[Decoding] = []
    async with Client(engine.endpoint) as client:
        for length, ids in prompts(lengths, 1, sizes.vocab_size, seed=1):  # compiles what each length needs
            warm = await ask(client, ids, FLASH_NEXT_NEW_TOKENS)
            print(f"  warm-up, {length} tokens: {warm.ttft_s:.3f} s", flush=True)
        for length, ids in prompts(lengths, repeats, sizes.vocab_size):
            answers.append(await ask(client, ids, FLASH_NEXT_NEW_TOKENS))
            print(f"  {length} tokens: {answers[-1].ttft_s:.3f} s", flush=True)
        for batch in batches:
            await decode(client, batch, WARM_UP_TOKENS, sizes.vocab_size)
            decodings.append(await decode(client, batch, stated.new_tokens, sizes.vocab_size))
            print(f"  {batch} at once: {decodings[-1].tokens_per_s:.1f} tokens/s", flush=True)
    return answers, decodings


def picture(arms: Sequence[Arm], lines: Path) -> None:
    """A plot beside the lines, where there is matplotlib."""
    out = lines.with_suffix(".png")
    try:
        plot_ttft.plot(arms, out)
        print(f"plotted in {out}")
    except ImportError:
        print(f"no matplotlib here: plot with python -m tests.bench.plot_ttft {lines.name} {out.name}")


def numbers(text: str) -> list[int]:
    """The whole numbers in a comma-separated list."""
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="", help="prompt tokens, comma-separated")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the result file of the CPU's table")
    synthetic = parser.add_argument_group("with --synthetic flash-next")
    synthetic.add_argument("--synthetic", choices=("flash-next",), help="a geometry with made-up weights")
    synthetic.add_argument("--out", type=Path, help="Markdown file; lines of JSON and a plot go beside it")
    synthetic.add_argument("--thresholds", default="", help="--demand-tokens of each launch, comma-separated")
    synthetic.add_argument("--decode", default="", help="requests at once, comma-separated")
    synthetic.add_argument("--decode-in", default="512", help="thresholds whose launches decode too; empty: none")
    synthetic.add_argument("--new-tokens", type=int, default=96, help="of an answer while decoding is timed")
    synthetic.add_argument("--slots", type=int, default=0)
    synthetic.add_argument("--layers", type=int)
    synthetic.add_argument("--vocab", type=int)
    synthetic.add_argument("--small", action="store_true", help="a tiny geometry, on the CPU")
    synthetic.add_argument("--device", choices=("cpu", "cuda"))
    synthetic.add_argument("--flag", action="append", default=[], help="a further flag of launch.py, as --flag=--x=y")
    synthetic.add_argument("--touch-gib", type=int, default=0, help="memory to fill and free first")
    synthetic.add_argument("--ready-s", type=float, default=240, help="seconds that a launch may take")
    synthetic.add_argument("--limit-s", type=float, default=530, help="no launch that might end after this is begun")
    synthetic.add_argument("--report-distinct", action="store_true", help="distinct experts a layer by prompt length")
    stated = parser.parse_args(argv)
    return flash_next(stated) if stated.synthetic else random_model(stated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
