"""The loop that runs against the one that was asked for."""

import asyncio
import sys

import pytest

from copyengine.wire.errors import ConfigError
from copyengine.wire.loop import loop_factory, resolve, run


async def running() -> str:
    return type(asyncio.get_running_loop()).__module__.split(".")[0]


def test_selector_is_never_anything_else() -> None:
    assert resolve("selector") == "selector" and run(running(), "selector") == "asyncio"
    assert loop_factory("selector") is asyncio.SelectorEventLoop


def test_uvloop_where_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert resolve("auto") == resolve("uvloop") == "uvloop"
    assert run(running(), "auto") == run(running(), "uvloop") == "uvloop"


def test_without_uvloop_auto_falls_back_and_uvloop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    assert resolve("auto") == "selector" and run(running(), "auto") == "asyncio"
    with pytest.raises(ConfigError, match="--event-loop uvloop"):
        loop_factory("uvloop")


def test_the_result_and_the_error_of_main_come_back() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fail(), "selector")
