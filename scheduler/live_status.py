"""One live line at the bottom of a terminal: what the engine does now.

```text
2 waiting, 16 running, 340 finished | 213.4 tokens/s | decode hits 94.1 % | link 12.43 GB/s
```
"""

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from copyengine.wire.errors import SlotstreamError
from copyengine.wire.logs import ERASE_LINE
from copyengine.wire.loop import EventLoop, run
from scheduler.client import Client
from scheduler.protocol import StatsReply

BUSY_S = 1.0
"""Seconds between two looks at the counters while they change."""

QUIET_S = 5.0
"""And while they do not: an idle engine is to stay idle."""

END_S = 0.5
"""Seconds that the thread has to end: the end of the engine waits for it."""


class LiveStatus:
    """Inside, the line is drawn on `out` from a thread of its own, if `out` is a terminal; otherwise nothing happens.

    The cursor is left at the line's beginning, so that whoever writes next writes over it; what copyengine.wire.logs
    prints erases it first. A scheduler that is gone is waited for.
    """

    def __init__(
        self, endpoint: str, out: TextIO, event_loop: EventLoop = "auto", ending: Callable[[], bool] = lambda: False
    ) -> None:
        """`ending`: whether the engine ends, so that a scheduler that is gone has done what it should."""
        self._ending = ending
        self._endpoint = endpoint
        self._out = out
        self._event_loop = event_loop
        self._drawing = threading.Lock()
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """From now on the line is there."""
        if self._out.isatty():
            self._thread = threading.Thread(target=self._run, name="live-status", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """The line is gone for good."""
        if self._thread is None:
            return
        self._stopped.set()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
                self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(END_S)
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            self._draw("", last=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            run(self._watch(), self._event_loop)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._stopped.is_set():
            try:
                async with Client(self._endpoint) as client:
                    await self._follow(client)
            except SlotstreamError:
                self._draw("" if self._ending() else "the scheduler does not answer")
                await self._pause(BUSY_S)

    async def _follow(self, client: Client) -> None:
        """Draw until stopped. SlotstreamError when the scheduler is gone."""
        before, before_s = await client.stats(), time.monotonic()
        self._draw(status_line(before, before, BUSY_S))
        pause_s = BUSY_S
        while not self._stopped.is_set():
            await self._pause(pause_s)
            now, now_s = await client.stats(), time.monotonic()
            self._draw(status_line(before, now, now_s - before_s))
            pause_s = QUIET_S if now == before else BUSY_S
            before, before_s = now, now_s

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _draw(self, line: str, last: bool = False) -> None:
        columns = shutil.get_terminal_size().columns
        with self._drawing:
            if last or not self._stopped.is_set():
                self._out.write(f"{ERASE_LINE}{line[: columns - 1]}\r")  # a full line would wrap, and stay
                self._out.flush()


def status_line(before: StatsReply, now: StatsReply, seconds: float) -> str:
    """What happened between two looks at the counters, `seconds` apart, and how many requests are in which state.

    After a restart the counters begin anew: what would be less than nothing is none.
    """
    decode = max(0, now.decode.lookups - before.decode.lookups)
    hits = min(decode, max(0, now.decode.hits - before.decode.hits))
    parts = [
        _requests(now),
        f"{max(0, now.generated_tokens - before.generated_tokens) / seconds:.1f} tokens/s",
        f"decode hits {100 * hits / decode:.1f} %" if decode else "decode hits -",
        f"link {max(0, _copied_nbytes(now) - _copied_nbytes(before)) / seconds / 1e9:.2f} GB/s",
    ]
    down = [worker.name for worker in now.workers if not worker.alive]
    return " | ".join([f"{', '.join(down)} down", *parts] if down else parts)


def _requests(stats: StatsReply) -> str:
    """States that no request is in are left out, but for running."""
    states = [("waiting", stats.waiting), ("running", stats.running), ("finished", stats.finished)]
    states += [("failed", stats.failed), ("aborted", stats.aborted)]
    return ", ".join(f"{count} {state}" for state, count in states if count or state == "running")


def _copied_nbytes(stats: StatsReply) -> int:
    return stats.decode.copied_nbytes + stats.demand.copied_nbytes + stats.streamed.copied_nbytes
