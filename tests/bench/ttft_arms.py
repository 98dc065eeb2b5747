"""What bench_ttft finds out, as lines of JSON, one for each launch, so that runs can be added to and plotted elsewhere.

Standard library and msgspec only.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

PUBLISHED_TOKENS = (87, 117, 151, 230, 387, 718, 1324)
PUBLISHED_STREAMED_S = (2.69, 2.67, 2.64, 2.60, 2.61, 2.60, 2.60)
PUBLISHED_DEMAND_S = (1.18, 1.36, 1.48, 1.68, 2.05, 2.63, 3.10)
"""Flash-Next NVFP4 on an RTX 3090 Ti, PCIe 4, as its owner reported them."""

PUBLISHED_SHARES = (0.44, 0.51, 0.56, 0.65, 0.79, 0.97, 1.0)
"""Of a layer's experts that these prompts wanted, taken from the times."""


class Prompt(Struct, frozen=True):
    """One answer. Expert figures are the prefill's alone."""

    tokens: int
    digest: int  # of the prompt's token ids
    answer: list[int]  # greedy
    ttft_s: float  # seen by the client
    scheduler_ttft_s: float  # from the request's arrival there
    demand_chunks: int
    streamed_chunks: int
    hits: int
    misses: int
    copied_nbytes: int
    cached_tokens: int = 0


class Decoding(Struct, frozen=True):
    """Several requests at once, while all of them decode."""

    batch: int
    tokens_per_s: float  # of all requests together
    tpot_s: float  # median over the requests
    hits: int
    misses: int
    distinct_tokens: float  # distinct tokens over tokens of an answer: near 0 would be an answer that goes round


class Arm(Struct, frozen=True):
    """One launch."""

    demand_tokens: int
    model: str
    layers: int
    experts: int
    slots: int
    device: str
    conditions: str
    ready_s: float
    prompts: list[Prompt]
    decodings: list[Decoding]


def append(path: Path, arm: Arm) -> None:
    """Add a line to the file, made if need be."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(arm) + b"\n")


def read(path: Path) -> list[Arm]:
    """The file's arms by threshold; of those with the same one the last. No file, no arms."""
    if not path.exists():
        return []
    arms = [msgspec.json.decode(line, type=Arm) for line in path.read_bytes().splitlines() if line.strip()]
    return [arm for _, arm in sorted({arm.demand_tokens: arm for arm in arms}.items())]


def of_length(arm: Arm, tokens: int) -> list[Prompt]:
    """The answers to prompts of this length."""
    return [prompt for prompt in arm.prompts if prompt.tokens == tokens]


def lengths(arms: Iterable[Arm]) -> list[int]:
    """All lengths of prompts."""
    return sorted({prompt.tokens for arm in arms for prompt in arm.prompts})


def name(arm: Arm) -> str:
    """What the arm is called in tables."""
    return f"demand up to {arm.demand_tokens}" if arm.demand_tokens else "streamed"


def distinct(arm: Arm, tokens: int) -> float | None:
    """Distinct experts that a prompt of this length routed to, per layer; None unless it was one demand chunk."""
    asked = [prompt for prompt in of_length(arm, tokens) if (prompt.demand_chunks, prompt.streamed_chunks) == (1, 0)]
    if not asked or not arm.layers:
        return None
    return statistics.median((prompt.hits + prompt.misses) / arm.layers for prompt in asked)


def equal_answers(arms: Sequence[Arm], tokens: int | None = None) -> tuple[int, int]:
    """How many prompts that several arms were asked (of this length, or any) got one answer, and how many there are."""
    answers: dict[int, list[list[int]]] = {}
    for arm in arms:
        for prompt in arm.prompts if tokens is None else of_length(arm, tokens):
            answers.setdefault(prompt.digest, []).append(prompt.answer)
    shared = [given for given in answers.values() if len(given) > 1]
    return sum(all(answer == given[0] for answer in given) for given in shared), len(shared)
