"""What --check prints: the memory that is needed and present, and what speed can be hoped for. Starts nothing.

The estimates are `copyengine.forecast`'s; of times they count the copies alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from copyengine.budget import Budget, Wanted, bank_experts, kv_token_nbytes
from copyengine.forecast import (
    Routing,
    distinct_experts,
    even_routing,
    measured_routing,
    missing_experts,
    share_held_by_frequency,
    share_held_by_recency,
    zipf_routing,
)
from copyengine.link_rate import LinkRate
from copyengine.model_spec import MoeSpec
from copyengine.planning import Need, Plan, Survey, mb
from scheduler.collected_stats import Figures

REPEATED = "repeat bit for bit, whatever else is served (--deterministic)"
PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 4096)


class Settings(Struct, frozen=True):
    """What a check is about, beside the plan."""

    wanted: Wanted
    demand_tokens: int
    stats_file: str = ""  # of an earlier run with --collect-stats
    deterministic: bool = False


class Kind(NamedTuple):
    """A way in which tokens may choose experts."""

    name: str
    routing: Routing


def report(plan: Plan, survey: Survey, settings: Settings, rate: LinkRate) -> str:
    """The whole text; without rates and times where it does not fit, which are those of sizes that nobody will have."""
    lines = [line for need in survey.needs if need.parts for line in memory_table(need)]
    lines += ["", *size_lines(plan, survey.budget, settings.wanted), *kv_lines(plan, settings.wanted, rate)]
    lines += [f"answers    {REPEATED}"] if settings.deterministic else []
    if any(need.short_nbytes > 0 for need in survey.needs):
        return "\n".join(lines)
    moe = plan.spec.moe
    if moe is None:
        return "\n".join([*lines, "", "a dense model: there are no experts to copy"])
    kinds, notes = _kinds(plan, moe, settings.stats_file)
    lines += ["", *hit_rate_table(plan, moe, survey.budget.slots, kinds, rate), *notes]
    lines += ["", *first_token_table(plan, survey.budget, settings, kinds, rate)]
    return "\n".join(lines)


def memory_table(need: Need) -> Iterator[str]:
    """What one memory must hold, part by part, beside what is free of it."""
    rows = [(part.name, mb(part.nbytes)) for part in need.parts]
    pinned = sum(part.nbytes for part in need.parts if "pinned" in part.name)
    rows.append(("needed", mb(need.total_nbytes)))
    rows += [("of that pinned", mb(pinned))] if pinned else []
    rows.append(("present, free", mb(need.available_nbytes)))
    left = need.short_nbytes
    rows.append(("MISSING", mb(left)) if left > 0 else ("left over", mb(-left)))
    yield need.place
    yield from (f"  {name:<36}{size:>14}" for name, size in rows)


def size_lines(plan: Plan, budget: Budget, wanted: Wanted) -> Iterator[str]:
    """How slots and KV share what there is."""
    asked = {True: "as asked", False: "auto"}
    experts = bank_experts(plan.spec)
    if experts:
        yield (
            f"slots      {budget.slots:,} of {experts:,} experts ({asked[bool(wanted.slots)]}), and "
            f"{budget.stream_slots:,} to stream through"
        )
    yield f"KV tokens  {budget.kv_tokens:,} ({asked[bool(wanted.kv_tokens)]})"
    yield from (f"note: {note}" for note in budget.notes)


def kv_lines(plan: Plan, wanted: Wanted, rate: LinkRate) -> Iterator[str]:
    """What it costs that KV lies in host memory, if it does."""
    if plan.gpus and wanted.kv_placement == "host" and rate.nbytes_per_s:
        time_ms = 1e3 * 1000 * kv_token_nbytes(plan.spec, plan.dtype) / rate.nbytes_per_s
        yield f"           read over the link: {time_ms:,.1f} ms a decoded token for each 1,000 tokens of context"


def hit_rate_table(plan: Plan, moe: MoeSpec, slots: int, kinds: Sequence[Kind], rate: LinkRate) -> Iterator[str]:
    """What share of a token's experts decoding finds in slots, from the worst routing to the best, and how long it
    takes to copy the others."""
    step = len(plan.spec.moe_layers) * moe.experts_per_token
    yield "decode hit rate of one sequence, estimated (S slots, L layers of E experts, K a token)"
    for name, routing in kinds:
        low, high = share_held_by_recency(routing, slots), share_held_by_frequency(routing, slots)
        span, copies = f"{_percent(low)} - {_percent(high)}", _copies_of_a_token(plan, step, high, low, rate)
        yield f"  {name:<34}{span:>18}{copies}"
    same, than = (1.0, ">=") if slots >= step else (0.0, "<")
    copies = _copies_of_a_token(plan, step, same, same, rate)
    yield f"  {'each token as the one before':<34}{_percent(same):>18}{copies}, since S {than} L x K = {step:,}"
    yield "  p is an expert's share of tokens, which are taken to choose independently of each other; real ones repeat"
    yield "  themselves more. From: the experts of the last m tokens are in slots, m being the most for which"
    yield "  sum 1 - (1 - p)^m <= S; to: the S likeliest experts are, with even routing S / (L x E)."


def first_token_table(
    plan: Plan, budget: Budget, settings: Settings, kinds: Sequence[Kind], rate: LinkRate
) -> Iterator[str]:
    """How long the copies take that a prompt's first token waits for."""
    most = min(plan.spec.max_position, budget.kv_tokens)
    if not rate.nbytes_per_s:
        yield f"time to the first token: the link was not measured: {rate.how}"
        return
    yield f"time to the first token, copies alone, at {rate.nbytes_per_s / 1e9:.1f} GB/s (measured: {rate.how})"
    heads = "".join(f"{'on demand: ' + kind.name:>34}" for kind in kinds) if settings.demand_tokens else ""
    yield f"  {'prompt tokens':>13}{'streamed':>20}{heads}"
    chunk = settings.wanted.max_step_tokens
    for tokens in (count for count in PROMPT_TOKENS if count <= most):
        chunks = -(-tokens // chunk)
        experts = bank_experts(plan.spec)
        cells = [_span(plan, chunks * max(0, experts - budget.slots), chunks * experts, rate, 20)]
        for kind in kinds if settings.demand_tokens else ():
            if tokens > min(settings.demand_tokens, chunk):
                cells.append(f"{'-':>34}")
                continue
            fewest = missing_experts(kind.routing, tokens, budget.slots)
            cells.append(_span(plan, fewest, distinct_experts(kind.routing, tokens), rate, 34))
        yield f"  {tokens:>13,}{''.join(cells)}"
    yield "  from: the S likeliest experts are in slots; to: none is. Computing comes on top where it takes longer than"
    yield "  the copies beside it: with long prompts, and without a GPU."


def _span(plan: Plan, fewest: float, most: float, rate: LinkRate, width: int) -> str:
    low, high = (1e3 * count * plan.record_nbytes / rate.nbytes_per_s for count in (fewest, most))
    return f"{f'{low:,.0f} - {high:,.0f} ms':>{width}}"


def _copies_of_a_token(plan: Plan, lookups: int, best: float, worst: float, rate: LinkRate) -> str:
    if not rate.nbytes_per_s:
        return ""
    low, high = (1e3 * lookups * (1 - share) * plan.record_nbytes / rate.nbytes_per_s for share in (best, worst))
    return f", copying {low:,.1f}" + (f" - {high:,.1f}" if low != high else "") + " ms a token"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _kinds(plan: Plan, moe: MoeSpec, stats_file: str) -> tuple[list[Kind], list[str]]:
    """The routings to reckon with, and what is to be said of the file."""
    shape = len(plan.spec.moe_layers), moe.experts, moe.experts_per_token
    kinds = [Kind("even routing", even_routing(*shape)), Kind("Zipf routing", zipf_routing(*shape))]
    counts, note = _counts(stats_file, shape[:2])
    if counts:
        kinds.append(Kind("routing as measured", measured_routing(counts, moe.experts_per_token)))
    return kinds, [note] if note else []


def _counts(stats_file: str, shape: tuple[int, int]) -> tuple[list[list[int]], str]:
    """Decode's routing counts of an earlier run, [L, E], or none and why."""
    path = Path(stats_file)
    if not stats_file or not path.is_file():
        return [], ""
    try:
        figures = msgspec.json.decode(path.read_bytes(), type=Figures)
    except (OSError, msgspec.DecodeError) as error:
        return [], f"note: --collect-stats {path}: not read: {error}"
    counts = figures.decode_routing
    if (len(counts), *{len(row) for row in counts}) != shape:
        return [], f"note: --collect-stats {path}: of {figures.layers} layers of {figures.experts} experts: not used"
    if not any(map(any, counts)):
        return [], f"note: --collect-stats {path}: nothing was decoded: not used"
    return counts, f"  as measured: decode_routing of {path}"
