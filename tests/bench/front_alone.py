"""The HTTP front's own time for a token: a real front on a real scheduler, and a model that takes no processor time."""

import asyncio
import queue
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from copyengine.wire.child import Child, Notices
from copyengine.wire.lifecycle import Listening, Ready
from tests.bench.http_load import offer_http
from tests.bench.offered_load import Load, Served, offer
from tests.bench.scheduler_alone import awaited, started
from tests.scheduler.rig import write_model

MODEL = "alone"


@dataclass(frozen=True)
class Rig:
    """A running engine: the scheduler's endpoint, the front's process and port."""

    endpoint: str
    front: psutil.Process
    port: int
    vocab_size: int


@dataclass(frozen=True)
class Taken:
    """What some load took: processor seconds of the front, and of the process that asked."""

    served: Served
    front_user_s: float
    front_system_s: float
    client_s: float

    @property
    def front_us(self) -> float:
        """Microseconds of the front's processor time for a token."""
        return 1e6 * (self.front_user_s + self.front_system_s) / self.served.load.tokens

    @property
    def client_us(self) -> float:
        """The same of the process that asked."""
        return 1e6 * self.client_s / self.served.load.tokens


@contextmanager
def rig(
    step_ms: float,
    flags: Sequence[str] = (),
    profile: Path | None = None,
    max_model_len: int = 0,
    event_loop: str = "auto",
) -> Iterator[Rig]:
    """Worker, scheduler and front, this one under cProfile if there is a file for it; `flags` are the front's."""
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name))
        vocab_size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
        with started(directory, vocab_size, None, step_ms, max_model_len, event_loop) as (_, endpoint):
            argv = ["--scheduler", endpoint, "--model", str(directory), "--http-port", "0", "--parent-pipe"]
            argv += ["--served-model-name", MODEL, "--log-level", "warning", "--event-loop", event_loop, *flags]
            module = "scheduler.http"
            if profile is not None:
                module, argv = "cProfile", ["-o", str(profile), "-m", module, *argv]
            notices: Notices = queue.SimpleQueue()
            front = Child("http", module, argv, notices)
            try:
                url = awaited(notices, "http", Listening).endpoint
                awaited(notices, "http", Ready)
                yield Rig(endpoint, psutil.Process(front.pid), int(url.rpartition(":")[2]), vocab_size)
            finally:
                front.stop()


def by_zmq(rig: Rig, load: Load, seed: int = 0) -> Taken:
    """Through scheduler.client."""
    return taken(rig, offer(rig.endpoint, load, seed))


def by_http(rig: Rig, load: Load, seed: int = 0) -> Taken:
    """Through the front."""
    return taken(rig, offer_http(rig.port, load, seed))


def taken(rig: Rig, asking: Awaitable[Served]) -> Taken:
    """What `asking` takes, on an event loop of its own."""

    async def ask() -> Served:
        return await asking

    before, before_s = rig.front.cpu_times(), time.process_time()
    served = asyncio.run(ask())
    after, after_s = rig.front.cpu_times(), time.process_time()
    return Taken(served, after.user - before.user, after.system - before.system, after_s - before_s)
