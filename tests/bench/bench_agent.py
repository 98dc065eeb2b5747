"""Time to first token of each turn of a conversation over a long prefix, as agents and chats with a long history have.

Every turn sends the whole history again: the prefix, what was asked and answered so far, and some new tokens. An engine
for each threshold in turn is asked the same through the real client, and must answer the same; and one that caches
nothing, for comparison. `python -m tests.bench.bench_agent --keep` does it on the CPU, with bench_ttft's random model
and writes the result file; `python -m tests.bench.bench_agent --synthetic flash-next --prefix 8000 --keep` on a GPU in
Flash-Next's geometry, with made-up weights.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from copyengine.checkpoint.random_model import Sizes, write_random_model
from scheduler.client import Client
from tests.bench import report
from tests.bench.asking import ask, launched
from tests.bench.bench_ttft import FLASH_NEXT_SLOTS, SIZES, SLOTS, numbers
from tests.bench.flash_next import write_flash_next
from tests.bench.ttft_arms import Prompt
from tests.e2e.engine import Engine

PREFIX_TOKENS = 2000
TURNS = 8
TURN_TOKENS = 50
NEW_TOKENS = 16
REPEATS = 3
THRESHOLDS = (0, 256, 512)
MAX_POSITION = 16_384

NOTES = """TTFT in ms, as the client sees it: medians over the conversations, the range in brackets, one conversation
before them thrown away. MB copied are the prefill's alone, medians. Turn 1 computes the prefix; a later one computes
what is new and up to a page (16 tokens) of the last tokens before. Prompts are random tokens, answers greedy."""


class Talk(Struct, frozen=True):
    """What is said: the prefix, and what each turn adds to the history before it is answered."""

    prefix: list[int]
    turns: list[list[int]]


class Arm(Struct, frozen=True):
    """One launch: `turns[i]` are the answers to turn i of each conversation."""

    name: str
    turns: list[list[Prompt]]


def talks(stated: argparse.Namespace, vocab_size: int) -> list[Talk]:
    """The same for every arm, no two with a common beginning; one more than is measured."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    return [
        Talk(tokens(stated.prefix), [tokens(stated.turn_tokens) for _ in range(stated.turns)])
        for _ in range(stated.repeats + 1)
    ]


async def converse(client: Client, talk: Talk, new_tokens: int) -> list[Prompt]:
    """Each turn's answer, one after the other."""
    history, answers = list(talk.prefix), list[Prompt]()
    for turn in talk.turns:
        history += turn
        answers.append(await ask(client, history, new_tokens))
        history += answers[-1].answer
    return answers


async def converse_all(engine: Engine, all_talks: Sequence[Talk], new_tokens: int) -> list[list[Prompt]]:
    """The answers by turn, the first conversation's left out."""
    async with Client(engine.endpoint) as client:
        conversations = [await converse(client, talk, new_tokens) for talk in all_talks]
    return [list(turn) for turn in zip(*conversations[1:], strict=True)]


@contextmanager
def model(stated: argparse.Namespace) -> Iterator[tuple[Sizes, list[str]]]:
    """A model's sizes, and the flags to launch it with."""
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", directory]
        if stated.synthetic:
            sizes = write_flash_next(Path(directory), stated.layers, small=stated.small)
            device = "cpu" if stated.small else "cuda"
            slots = stated.slots or (sizes.experts if stated.small else FLASH_NEXT_SLOTS)
            flags += ["--load-format", "dummy", "--device", device]
        else:
            sizes, slots = replace(SIZES, max_position=MAX_POSITION), stated.slots or SLOTS
            write_random_model(Path(directory), sizes)
        yield sizes, [*flags, "--slots", str(slots), *stated.flag]


def measure(name: str, flags: Sequence[str], all_talks: Sequence[Talk], stated: argparse.Namespace) -> Arm:
    """One launch, with KV for all that it is told, so that nothing is evicted."""
    talk = all_talks[0]
    longest = len(talk.prefix) + sum(len(turn) + stated.new_tokens for turn in talk.turns)
    kv_tokens = (longest + 16) * len(all_talks)
    with launched(stated.ready_s, *flags, "--kv-tokens", str(kv_tokens)) as engine:
        print(f"{name}: ready", flush=True)
        arm = Arm(name, asyncio.run(converse_all(engine, all_talks, stated.new_tokens)))
    print(f"{name}: done", flush=True)
    return arm


def tables(arms: Sequence[Arm], sizes: Sizes, conditions: str) -> str:
    """The whole result file."""
    routed = f"E {sizes.experts}, K {sizes.experts_per_token}"
    about = f"The model: {sizes.layers} layers, {routed}, H {sizes.hidden}, I {sizes.intermediate}."
    parts = ["# Time to first token over the turns of a conversation", conditions, about]
    parts += [_table(arms, _ttft_ms, _spread), "Prefill traffic, MB copied:"]
    parts += [
        _table(arms, lambda answer: answer.copied_nbytes / 1e6, lambda values: f"{statistics.median(values):.1f}")
    ]
    return "\n\n".join([*parts, NOTES])


def _table(arms: Sequence[Arm], value: Callable[[Prompt], float], shown: Callable[[Sequence[float]], str]) -> str:
    rows = []
    for i, same_turn in enumerate(zip(*(arm.turns for arm in arms), strict=True)):
        first = same_turn[0][0]
        chunks = ", ".join(dict.fromkeys(_chunks(answers[0]) for answers in same_turn))
        cells = [shown([value(answer) for answer in answers]) for answers in same_turn]
        rows.append([str(i + 1), str(first.tokens), str(first.cached_tokens), *cells, chunks])
    return report.table(["turn", "prompt tokens", "cached", *(arm.name for arm in arms), "chunks"], rows)


def _chunks(answer: Prompt) -> str:
    counts = ((answer.demand_chunks, "demand"), (answer.streamed_chunks, "streamed"))
    return " + ".join(f"{count} {kind}" for count, kind in counts if count)


def _ttft_ms(answer: Prompt) -> float:
    return 1e3 * answer.ttft_s


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def answers_agree(arms: Sequence[Arm]) -> bool:
    """Whether all arms with a cache gave every turn of every conversation the same answer.

    The one that caches nothing computes larger chunks, which may round otherwise.
    """
    answers = [[[answer.answer for answer in turn] for turn in arm.turns] for arm in arms]
    return all(answer == answers[0] for answer in answers)


def main(argv: Sequence[str]) -> int:
    """The command line; 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="tokens before the first turn's own")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--turn-tokens", type=int, default=TURN_TOKENS, help="new tokens of each turn")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each answer")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="conversations that are measured")
    parser.add_argument("--thresholds", default="", help="--demand-tokens of each launch, comma-separated")
    parser.add_argument("--keep", action="store_true", help="write the result file")
    parser.add_argument("--synthetic", choices=("flash-next",), help="a geometry with made-up weights, on a GPU")
    parser.add_argument("--small", action="store_true", help="with --synthetic: a tiny geometry, on the CPU")
    parser.add_argument("--layers", type=int, help="with --synthetic")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="a further flag of launch.py, as --flag=--x=y")
    parser.add_argument("--ready-s", type=float, default=240, help="seconds that a launch may take")
    stated = parser.parse_args(argv)
    gpu = report.gpu_name() if stated.synthetic and not stated.small else ""
    with model(stated) as (sizes, flags):
        said = talks(stated, sizes.vocab_size)
        reusing = [
            measure(f"demand up to {n}" if n else "streamed", [*flags, "--demand-tokens", str(n)], said, stated)
            for n in numbers(stated.thresholds) or THRESHOLDS
        ]
        without = measure(
            "streamed, no cache", [*flags, "--demand-tokens", "0", "--disable-prefix-cache"], said, stated
        )
    text = tables([*reusing, without], sizes, report.gpu_conditions(gpu) if gpu else report.conditions())
    print(text)
    if stated.keep:
        name = "flash-next_agent" if stated.synthetic else "agent"
        path = report.path_of(name, gpu)
        path.write_text(text + "\n", "utf-8")
        print(f"kept in {path}")
    return 0 if answers_agree(reusing) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
