"""GPUs that no machine needs to have, in place of those that the driver finds.

For tests/copyengine/test_placement.py and tests/test_launch.py.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from copyengine import placement
from copyengine.device.probe import Found, GpuFacts

GB = 10**9
H200 = GpuFacts(0, "NVIDIA H200", "0000:1b:00.0", 150 * GB, 140 * GB, True, (9, 0))


def gpus(count: int, **changes: Any) -> list[GpuFacts]:
    """`count` H200s, each with `changes`."""
    return [msgspec.structs.replace(H200, ordinal=i, **changes) for i in range(count)]


def pretend(monkeypatch: pytest.MonkeyPatch, found: Sequence[GpuFacts] | Exception, lacking: str = "") -> None:
    """Make up a machine whose driver gives or raises `found`, and whose packages are all there but for `lacking`."""

    def find() -> Found:
        if isinstance(found, Exception):
            raise found
        return Found(list(found), [])

    monkeypatch.setattr(placement, "lacking_for_gpus", lambda: lacking)
    monkeypatch.setattr(placement, "find_gpus", find)
