# mypy: allow-untyped-calls
"""What torch.profiler saw of a few launches: kernels by time, and all of them one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 15
LINES = 120
NAME = 48


def profiled(work: Callable[[], object]) -> str:
    """Two tables as a block of Markdown. `work` is done once."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    events = [event for event in prof.events() or [] if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return "\n".join(["```text", *by_time(events), "", *in_order(events), "```"])


def by_time(events: list[Any]) -> list[str]:
    """Names by the time that they took."""
    total: dict[str, list[float]] = {}
    for event in events:
        total.setdefault(event.name, []).append(event.time_range.elapsed_us())
    longest = sorted(total.items(), key=lambda item: -sum(item[1]))[:TOP]
    lines = [f"{len(events)} on the device, {sum(map(sum, total.values())):.1f} us of work"]
    return lines + [f"{sum(t):10.1f} us {len(t):5} x {sum(t) / len(t):8.1f}  {name[:NAME]}" for name, t in longest]


def in_order(events: list[Any]) -> list[str]:
    """Start, length and the gap before each, in us."""
    lines = [f"{'start':>10} {'us':>8} {'gap':>8}"]
    first = events[0].time_range.start if events else 0.0
    end = first
    for event in events[:LINES]:
        span = event.time_range
        gap = span.start - end
        lines.append(f"{span.start - first:10.1f} {span.elapsed_us():8.1f} {gap:8.1f}  {event.name[:NAME]}")
        end = max(end, span.end)
    return lines + ([f"... and {len(events) - LINES} more"] if len(events) > LINES else [])
