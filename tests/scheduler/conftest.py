"""Fixtures: a model directory without weights, and both event loops."""

from pathlib import Path

import pytest

from tests.scheduler.rig import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["selector", "uvloop"])
def event_loop(request: pytest.FixtureRequest) -> str:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return str(request.param)
