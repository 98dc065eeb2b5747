"""Which event loop a process runs on."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from copyengine.wire.errors import ConfigError

EventLoop = Literal["auto", "uvloop", "selector"]
T = TypeVar("T")


def resolve(name: EventLoop) -> Literal["uvloop", "selector"]:
    """The loop that `name` means here: auto is uvloop where it is installed. ConfigError for uvloop where it is not."""
    if name == "selector":
        return "selector"
    try:
        import uvloop  # noqa: F401
    except ImportError:
        if name == "uvloop":
            raise ConfigError(
                "--event-loop uvloop: uvloop is not installed here; use --event-loop selector or install uvloop"
            ) from None
        return "selector"
    return "uvloop"


def loop_factory(name: EventLoop) -> Callable[[], asyncio.AbstractEventLoop]:
    """A factory for asyncio.Runner. Never the Proactor loop of Windows: zmq.asyncio cannot use it."""
    if resolve(name) == "selector" or sys.platform == "win32":
        return asyncio.SelectorEventLoop
    import uvloop

    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T], event_loop: EventLoop) -> T:
    """Run `main` to its end on the chosen loop."""
    with asyncio.Runner(loop_factory=loop_factory(event_loop)) as runner:
        return runner.run(main)
