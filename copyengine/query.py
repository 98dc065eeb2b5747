"""How many experts a query takes, and in how many groups the layers of a streamed chunk pass through. Pure."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]

QUERY_EXPERTS: Mapping[DeviceKind, int] = MappingProxyType({"cpu": 32, "cuda": 64})
"""Experts a query is cut at. Less than MAX_QUERY, so that a layer's first experts are computed while its next ones are
copied: time to first token of 128 tokens on demand over E = 128 was 596 ms at 32, 795 ms at 128 (2-core AMD EPYC,
2026-11, tests/bench/results/LOG.md)."""

STREAM_LAYERS = 2
MAX_STREAM_GROUPS: Mapping[DeviceKind, int] = MappingProxyType({"cpu": 16, "cuda": 8})
"""Stream slots hold this many layers, one being copied while the other is computed, in this many groups at most."""


def query_experts(experts: int, device: DeviceKind = "cpu") -> int:
    """Experts of a query or stream group at most, in layers of E = `experts`."""
    return min(experts, QUERY_EXPERTS[device])


def stream_groups(experts: int, device: DeviceKind = "cpu") -> int:
    """How many groups the stream slots make up, in layers of E = `experts`; none without experts."""
    if experts == 0:
        return 0
    return min(STREAM_LAYERS * math.ceil(experts / query_experts(experts, device)), MAX_STREAM_GROUPS[device])
