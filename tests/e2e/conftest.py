"""One running engine on the built-in model for all tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engine import Engine, running
from tests.e2e.windows import CONDITIONS

SLOTS = 128
DEMAND_TOKENS = 64


@pytest.fixture(scope="session", autouse=True)
def cache(run_directory: Path) -> Iterator[Path]:
    """A cache directory of these tests' own, where the built-in model is made once."""
    directory = run_directory / "cache"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(scope="session", params=["uvloop", "windows"])
def engine(cache: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine with its default process layout, on uvloop, and on the selector loop in Windows' conditions."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    event_loop, env = ("uvloop", {}) if request.param == "uvloop" else ("selector", CONDITIONS)
    sizes = ("--slots", str(SLOTS), "--demand-tokens", str(DEMAND_TOKENS))
    flags = (*sizes, "--event-loop", event_loop, "--http-port", "0")
    with running(*flags, env=env) as started:
        yield started
