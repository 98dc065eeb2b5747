"""A few inputs of each target, the same in every run; many more by `python -m tests.fuzz TARGET`."""

import importlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.live_engine import LiveEngine
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    LiveEngine.end()


@pytest.mark.parametrize("name", TARGETS)
def test_a_named_refusal_or_a_right_answer(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}")

    @settings(max_examples=TARGETS[name], derandomize=True, database=None)
    @given(st.binary(min_size=60, max_size=200))
    def run(data: bytes) -> None:
        target.one_input(data)

    run()
