"""bench_ttft's lines as Markdown."""

import statistics
from collections.abc import Callable, Sequence

from tests.bench import report
from tests.bench.ttft_arms import (
    PUBLISHED_DEMAND_S,
    PUBLISHED_SHARES,
    PUBLISHED_STREAMED_S,
    PUBLISHED_TOKENS,
    Arm,
    Prompt,
    distinct,
    equal_answers,
    lengths,
    name,
    of_length,
)

NOTES = """TTFT is the client's, in ms: medians over the repeats, the range in brackets. Prompts are of random tokens,
the same for every launch; an answer is some greedy tokens, and the same if all launches gave the same. Weights are
made up, routers skewed so that a prompt wants the share of a layer's experts that the published times tell of.
Decoding is of sampled answers, while all of them decode. Published: Flash-Next itself on an RTX 3090 Ti, PCIe 4;
machine and attention are others there: compare ratios, not seconds."""


def tables(arms: Sequence[Arm], with_distinct: bool = False) -> str:
    """The whole result file."""
    if not arms:
        return "no launch has come to its end\n"
    parts = [f"# Time to first token and decoding: {arms[0].model}", _launches(arms), _ttft(arms), _traffic(arms)]
    if with_distinct:
        parts.append(_distinct(arms))
    parts += [_decoding(arms), NOTES]
    return "\n\n".join(part for part in parts if part) + "\n"


def _launches(arms: Sequence[Arm]) -> str:
    conditions = dict.fromkeys(arm.conditions for arm in arms)
    rows = [[name(arm), f"{arm.layers} x {arm.experts}", str(arm.slots), f"{arm.ready_s:.0f}"] for arm in arms]
    return "\n\n".join([*conditions, report.table(("launch", "experts", "slots", "ready after s"), rows)])


def _ttft(arms: Sequence[Arm]) -> str:
    demand = [arm for arm in arms if arm.demand_tokens]
    head = ["prompt tokens", *(f"{name(arm)}: TTFT ms" for arm in arms), *(f"{name(arm)} / streamed" for arm in demand)]
    head += ["published streamed s", "published demand s", "published ratio", "same answer"]
    rows = []
    for length in lengths(arms):
        streamed = next((_median(arm, length, _ttft_ms) for arm in arms if not arm.demand_tokens), None)
        equal, shared = equal_answers(arms, length)
        cells = [_spread(arm, length) for arm in arms]
        cells += [_ratio(_median(arm, length, _ttft_ms), streamed) for arm in demand]
        rows.append([str(length), *cells, *_published(length), f"{equal} of {shared}" if shared else ""])
    return report.table(head, rows)


def _traffic(arms: Sequence[Arm]) -> str:
    head = ["prompt tokens", *(f"{name(arm)}: {what}" for arm in arms for what in ("GB copied", "hits", "misses"))]
    rows = []
    for length in lengths(arms):
        cells = [str(length)]
        for arm in arms:
            copied = _median(arm, length, lambda prompt: prompt.copied_nbytes / 1e9)
            counts = [_median(arm, length, lambda p: p.hits), _median(arm, length, lambda p: p.misses)]
            cells += ["" if copied is None else f"{copied:.2f}"]
            cells += ["" if count is None else f"{count:.0f}" for count in counts]
        rows.append(cells)
    return report.table(head, rows)


def _distinct(arms: Sequence[Arm]) -> str:
    """Of the arms whose chunks were on demand; what a streamed chunk routes to is not counted."""
    rows = []
    for length in lengths(arms):
        found = next((found for arm in arms if (found := distinct(arm, length)) is not None), None)
        share = dict(zip(PUBLISHED_TOKENS, PUBLISHED_SHARES, strict=True)).get(length)
        of = "" if found is None else f"{found / arms[0].experts:.2f}"
        rows.append([str(length), "" if found is None else f"{found:.0f}", of, "" if share is None else f"{share:.2f}"])
    return report.table(("prompt tokens", "distinct experts a layer", "share of E", "share by published times"), rows)


def _decoding(arms: Sequence[Arm]) -> str:
    rows = [
        [
            name(arm),
            str(decoding.batch),
            f"{decoding.tokens_per_s:.1f}",
            f"{1e3 * decoding.tpot_s:.2f}",
            f"{decoding.hits / max(1, decoding.hits + decoding.misses):.1%}",
            f"{decoding.distinct_tokens:.2f}",
        ]
        for arm in arms
        for decoding in arm.decodings
    ]
    head = ("launch", "requests at once", "tokens/s", "ms a token", "experts hit", "distinct tokens of an answer")
    return report.table(head, rows) if rows else ""


def _published(length: int) -> list[str]:
    if length not in PUBLISHED_TOKENS:
        return ["", "", ""]
    streamed, demand = (of[PUBLISHED_TOKENS.index(length)] for of in (PUBLISHED_STREAMED_S, PUBLISHED_DEMAND_S))
    return [f"{streamed:.2f}", f"{demand:.2f}", f"{demand / streamed:.2f}"]


def _ttft_ms(prompt: Prompt) -> float:
    return 1e3 * prompt.ttft_s


def _median(arm: Arm, length: int, value: Callable[[Prompt], float]) -> float | None:
    values = [value(prompt) for prompt in of_length(arm, length)]
    return statistics.median(values) if values else None


def _spread(arm: Arm, length: int) -> str:
    times = sorted(map(_ttft_ms, of_length(arm, length)))
    return f"{statistics.median(times):.0f} ({times[0]:.0f}-{times[-1]:.0f})" if times else ""


def _ratio(time: float | None, streamed: float | None) -> str:
    return f"{time / streamed:.2f}" if time is not None and streamed else ""
