"""What bench_layer measures: routings, what is missing of them, a peer's times and those to be reached.

The peer is the MoE offload layer of FreeToken 0.1.3, on an H200, 2026-11.
"""

from typing import NamedTuple

SLOTS = 2100
LAYERS = 4
"""As many as fit into the slots whole, so that everything may be resident; four layers' experts do not fit into L2."""
SHARES = (25, 50, 100)
"""Per cent of a layer that is resident when it is streamed."""


class Case(NamedTuple):
    """A routing and what is missing of it; times of the peer and to be reached, in ms."""

    name: str
    tokens: int
    zipf: float
    distinct: int | None
    missing: int | None  # None: all
    peer: float | None = None
    target: float | None = None


DEMAND = (
    Case("Zipf(1)", 128, 1.0, 332, None, 24.1, 18.0),
    Case("Zipf(1)", 128, 1.0, 332, 100, 14.9, 6.5),
    Case("Zipf(1)", 128, 1.0, 332, 0, 11.4, 1.5),
    Case("uniform", 128, 0.0, 465, None, 33.4, 25.0),
    Case("uniform", 128, 0.0, 465, 140, 20.3),
    Case("uniform", 128, 0.0, 465, 0, 15.6),
)
DECODE = (
    Case("graph", 1, 0.0, 10, 0, 0.0475, 0.045),
    Case("graph", 1, 0.0, 10, 3, 0.222, 0.235),
    Case("graph", 1, 0.0, 10, 10, 0.611, 0.600),
    Case("graph", 4, 0.0, 38, 0, 0.124, 0.124),
    Case("graph", 4, 0.0, 38, 11, 0.743, 0.743),
    Case("graph", 4, 0.0, 38, 38, 2.240, 2.240),
)
STREAMED_PEER_MS = {16: 25.7, 128: 25.7, 1024: 25.7, 4096: 36.0}
STREAMED_TARGET_MS = {16: 26.0, 128: 26.0, 1024: 26.0, 4096: 26.5}
