"""What bodies become. What limits them is in test_app.py."""

import gc
from typing import Any

import msgspec
import pytest

from scheduler.http.errors import ApiError
from scheduler.http.reading import LARGE_NBYTES, decoded


@pytest.mark.parametrize("item", [b"[]", b"{}", b"x"], ids=["lists", "objects", "no JSON"])
def test_a_large_body_is_decoded_without_the_collector(item: bytes) -> None:
    """Which runs at other times as before, also after a body that is none."""
    body = b"[" + b",".join([item] * (LARGE_NBYTES // len(item))) + b"]"
    phases: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(seen)
    try:
        if item == b"x":
            with pytest.raises(ApiError, match="malformed"):
                decoded(msgspec.json.Decoder(Any), body)
        else:
            value: Any = decoded(msgspec.json.Decoder(Any), body)
            assert len(value) == body.count(item)
            assert phases.count("start") <= 1, "once when it is over"
    finally:
        gc.callbacks.remove(seen)
    assert gc.isenabled()
