"""Admission on one GPU: first against the reference in thousands of random histories, then its time.

`python -m tests.bench.bench_admit --out results.md` from the repository's root, on a machine with an H200: under two
minutes, kernels compiled on the way included. Needs torch, triton, numpy and msgspec. A launch is timed by two events
that are queued behind a sleep, so that no time of the host is between them; tables are put back before each.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from kernels import admit
from kernels.admit.state import AdmissionState
from tests.bench.report import gpu_conditions, table
from tests.kernels import admitted_rows, stream_histories
from tests.kernels.admit_histories import (
    LARGE,
    SMALL,
    Pair,
    Size,
    graph_replays,
    offsets_of,
    reader_in_a_thread,
    ring_stays_full,
    run,
    saturated_ages,
)

LAYERS, EXPERTS, CLOCK = 60, 512, 100_000
SLOTS = (2_100, 24_576)
DISTINCT = (1, 10, 140, 332, 465, 512)
MISSING = (0.0, 0.3, 1.0)
MEDIAN_OF = 20
SLEEP_CYCLES = 1_000_000


def main() -> None:
    """Check, time, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file for the results")
    parser.add_argument("--histories", type=int, default=2_000, help="random histories over small pools")
    options = parser.parse_args()
    start = time.monotonic()
    lines = [f"# Admission on the device\n\n{conditions()}\n", *check(options.histories)]
    rows = [row for slots in SLOTS for max_query in (128, 32) for row in timings(slots, max_query)]
    floor = summary(measure(lambda: None, lambda: None))
    head = ("slots", "query", "distinct", "missing", "queries", "eager, µs: median (min-max)", "graph, µs")
    lines += ["", table(head, rows), "", f"Two events with nothing in between: {floor} µs.", ""]
    parts = [row for group_slots in (64, 128) for row in part_timings(group_slots)]
    lines += ["A part of a streamed layer:", "", table(("part", "missing", *head[-2:]), parts), ""]
    lines += [f"The whole run: {time.monotonic() - start:.0f} s."]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))


def conditions() -> str:
    """Command, GPU, versions, commit and shapes."""
    return (
        f"{gpu_conditions(torch.cuda.get_device_name())}\n"
        f"- {LAYERS} layers of {EXPERTS} experts, pool full, stamps random, ring in pinned host memory; "
        f"medians of {MEDIAN_OF}"
    )


def check(histories: int) -> list[str]:
    """Every check; a line for each. AssertionError where tables, flags or records differ."""
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{histories} random histories, small pools", lambda: run(1, histories, "cuda", SMALL)),
        ("100 random histories, large pools", lambda: run(2, 100, "cuda", LARGE)),
        ("16 queries through a ring of 2, a thread reading", lambda: reader_in_a_thread("cuda")),
        ("a ring that stays full", lambda: ring_stays_full("cuda")),
        ("ages beyond 2^31", lambda: saturated_ages("cuda")),
        ("streamed layers, 300 random histories, small pools", lambda: stream_histories.run(3, 300, "cuda")),
        ("and 12 on large pools", lambda: stream_histories.run(4, 12, "cuda", stream_histories.LARGE)),
        ("every routed row computed once, 40 pools", lambda: admitted_rows.run(5, 40, "cuda")),
        ("50 replays of a captured launch", lambda: graph_replays(50)),
    ]
    lines = []
    for name, body in checks:
        start = time.monotonic()
        body()
        lines.append(f"- equal to the reference: {name} ({time.monotonic() - start:.1f} s)")
        print(lines[-1], flush=True)
    return lines


def timings(slots: int, max_query: int) -> list[tuple[str, ...]]:
    """Rows of the table for one pool."""
    rows: list[tuple[str, ...]] = []
    pair = Pair(Size(LAYERS, EXPERTS, slots, max_query, 64), "cuda")
    for distinct in DISTINCT if max_query == 128 else DISTINCT[-1:]:
        for share in MISSING:
            rng = random.Random(distinct)
            experts = sorted(rng.sample(range(EXPERTS), distinct))
            missing = round(share * distinct)
            fill(pair.reference, experts[missing:] if rng.random() < 0.5 else experts[: distinct - missing], rng)
            copy(pair.reference, pair.state)
            before = admit.new_state(LAYERS, EXPERTS, slots, "cuda")
            copy(pair.state, before)
            pair.step(0, experts)  # equal to the reference here too
            offsets = offsets_of(experts, EXPERTS).cuda()
            eager, graph = time_both(
                pair,
                partial(admit.admit_layer, pair.state, pair.device, 0, offsets),
                partial(copy, before, pair.state),
            )
            pair.expected_stats = pair.device.stats.tolist()
            queries = -(-distinct // max_query)
            rows.append((f"{slots:,}", str(max_query), str(distinct), str(missing), str(queries), eager, graph))
            print(" ".join(rows[-1]), flush=True)
    return rows


def part_timings(group_slots: int) -> list[tuple[str, ...]]:
    """Rows of the table of parts: the first of a layer, of which some experts are resident."""
    rows: list[tuple[str, ...]] = []
    pair = Pair(Size(LAYERS, EXPERTS, SLOTS[0], 128, 64), "cuda")
    flags = torch.ones(4, dtype=torch.int32, device="cuda")
    stream = admit.new_device_stream(pair.state, pair.device, flags, 1000, SLOTS[0], group_slots, len(flags))
    for share in MISSING:
        missing = round(share * group_slots)
        fill(pair.reference, list(range(missing, group_slots)), random.Random(missing))
        copy(pair.reference, pair.state)
        request = partial(admit.request_part, pair.state, pair.device, stream, 0, 0, 0)
        rows.append((str(group_slots), str(missing), *time_both(pair, request, lambda: None)))
        misses = int(stream.stats[0, 1])
        assert misses % max(1, missing) == 0 and bool(misses) == bool(missing)
        stream.stats.zero_()
        print(" ".join(rows[-1]), flush=True)
    return rows


def time_both(pair: Pair, launch: Callable[[], None], put_back: Callable[[], None]) -> tuple[str, str]:
    """One launch, eager and as a graph, from tables that are put back and a ring that is empty."""

    def restore() -> None:
        torch.cuda.synchronize()
        while pair.reader.poll() is not None:
            pass
        put_back()

    eager = measure(launch, restore)
    restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    replayed = measure(graph.replay, restore)
    assert pair.device.control[admit.ERROR].item() == 0
    restore()
    return summary(eager), summary(replayed)


def measure(launch: Callable[[], None], restore: Callable[[], None]) -> list[float]:
    """Microseconds of `launch` on the device, MEDIAN_OF times after three to warm up."""
    times = []
    for _ in range(MEDIAN_OF + 3):
        restore()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[3:]


def summary(times: list[float]) -> str:
    """Median and spread."""
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"


def fill(state: AdmissionState, resident: list[int], rng: random.Random) -> None:
    """A full pool in which of layer 0 only `resident` are, last used at random times."""
    others = rng.sample(range(EXPERTS, LAYERS * EXPERTS), state.slots - len(resident))
    owners = torch.tensor(rng.sample(resident + others, state.slots), dtype=torch.int32)
    state.owner.copy_(owners)
    state.slot_of.fill_(-1)
    state.slot_of.view(-1)[owners.long()] = torch.arange(state.slots, dtype=torch.int32)
    state.last_used.copy_(torch.randint(1, CLOCK, (state.slots,), generator=torch.Generator().manual_seed(len(others))))
    state.clock.fill_(CLOCK)


def copy(source: AdmissionState, target: AdmissionState) -> None:
    """All tables."""
    for field in fields(AdmissionState):
        getattr(target, field.name).copy_(getattr(source, field.name))


if __name__ == "__main__":
    main()
