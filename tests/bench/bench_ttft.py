"""Time to first token over the prompt's length: every chunk streamed against every chunk on demand.

Two engines in turn on one random model, each asked the same prompts through the real client; a prompt's answer must be
the same from both. `python -m tests.bench.bench_ttft --keep` writes the result file.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from copyengine.checkpoint.random_model import Sizes, write_random_model
from scheduler.client import Client
from scheduler.protocol import Sampling, StatsReply
from tests.bench import report
from tests.e2e.engine import Engine, running

SIZES = Sizes(
    layers=12, hidden=512, intermediate=512, experts=128, experts_per_token=8, heads=8, kv_heads=2, head_dim=64
)
"""2.4 GB of bfloat16 experts in 12 layers of 128."""
SLOTS = 384
LENGTHS = (1, 4, 16, 64, 128, 256, 512)
WARM_UP = 3
NEW_TOKENS = 8


TITLE = "# Time to first token: streamed against demand prefill"
NOTES = f"""Medians over the repeats, the range of TTFT in brackets. Copied bytes and loaded experts are the prefill's
alone, by the engine's counters; an answer is {NEW_TOKENS} greedy tokens. The model: {SIZES.layers} layers,
E {SIZES.experts}, K {SIZES.experts_per_token}, H {SIZES.hidden}, I {SIZES.intermediate}, bfloat16; {SLOTS} slots.
Weights and prompts are random, so that routing is nearly uniform. On the host backend a copy is a memcpy that shares
cores and memory bandwidth with the computation: the table shows what demand prefill saves there, not what it saves on
a GPU's link."""


class Sample(Struct, frozen=True):
    """One answer, and what its prefill copied."""

    tokens: list[int]
    ttft_s: float
    experts: int
    nbytes: int


def prefill_traffic(stats: StatsReply) -> tuple[int, int]:
    """Experts and bytes copied for prefill chunks so far."""
    demand, streamed = stats.demand, stats.streamed
    return demand.misses + streamed.misses, demand.copied_nbytes + streamed.copied_nbytes


def prompts(lengths: Sequence[int], repeats: int) -> list[tuple[int, list[int]]]:
    """(length, token ids): the same for both arms, no two alike, lengths taken in turn so that drift hits all."""
    draw = random.Random(0)
    return [(n, [draw.randrange(SIZES.vocab_size) for _ in range(n)]) for _ in range(repeats) for n in lengths]


async def ask(client: Client, ids: list[int]) -> Sample:
    """One greedy answer."""
    experts, nbytes = prefill_traffic(await client.stats())
    answer = client.generate(token_ids=ids, sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True))
    tokens = [token async for piece in answer for token in piece.token_ids]
    assert answer.finished
    experts_now, nbytes_now = prefill_traffic(await client.stats())
    return Sample(tokens, answer.finished.timing.ttft_s, experts_now - experts, nbytes_now - nbytes)


async def ask_all(engine: Engine, questions: list[tuple[int, list[int]]]) -> list[Sample]:
    """All answers, one after the other, after some that are thrown away."""
    async with Client(engine.endpoint) as client:
        for _ in range(WARM_UP):
            await ask(client, questions[-1][1])
        return [await ask(client, ids) for _, ids in questions]


def measure(model: Path, demand_tokens: int, questions: list[tuple[int, list[int]]]) -> list[Sample]:
    """One arm."""
    with running("--model", str(model), "--slots", str(SLOTS), "--demand-tokens", str(demand_tokens)) as engine:
        return asyncio.run(ask_all(engine, questions))


def row(length: int, streamed: list[Sample], demand: list[Sample]) -> list[str]:
    """One line of the table: medians, and the spread of TTFT."""

    def cells(samples: list[Sample]) -> list[str]:
        ttft_ms = sorted(1e3 * sample.ttft_s for sample in samples)
        return [
            f"{statistics.median(ttft_ms):.0f} ({ttft_ms[0]:.0f}-{ttft_ms[-1]:.0f})",
            f"{statistics.median(sample.nbytes for sample in samples) / 1e6:.0f}",
            f"{statistics.median(sample.experts for sample in samples):.0f}",
        ]

    equal = sum(a.tokens == b.tokens for a, b in zip(streamed, demand, strict=True))
    return [str(length), *cells(streamed), *cells(demand), f"{equal} of {len(streamed)}"]


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 if any answer differs between the arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="prompt tokens, comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write the result file")
    stated = parser.parse_args(argv)
    lengths = [int(n) for n in stated.lengths.split(",")]
    questions = prompts(lengths, stated.repeats)
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
    return 0 if all(a.tokens == b.tokens for a, b in zip(*arms, strict=True)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
