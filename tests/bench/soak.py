"""One soak: the load, the rest behind it, and the reckoning. bench_soak.py is the command for a long one."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from scheduler.encoding import ENCODE_THREADS
from scheduler.grammar import COMPILE_THREADS
from scheduler.protocol import StatsReply
from tests.bench.bench_idle import MARK_PERCENT, busy_s, processes
from tests.bench.soak_acts import Sizes
from tests.bench.soak_books import mistakes, request_lines
from tests.bench.soak_load import Ledger, Users
from tests.bench.soak_samples import Sampler, growing
from tests.e2e.engine import Engine

RUNNING, QUEUED = 6, 24
FLAGS = (
    *("--http-port", "0", "--slots", "128", "--demand-tokens", "64", "--chunked-prefill-size", "256"),
    *("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED)),
)
POOL_THREADS = ENCODE_THREADS + COMPILE_THREADS
"""A thread of a pool is made when so many works come at once, and stays."""

KILLED = ("worker0", "copyengine", "http")
"""In turn. Not the scheduler, whose counters would begin anew, nor launch.py, after which nothing is started anew."""


@dataclass(frozen=True)
class Plan:
    """How long, and how much at once. `kill_s` is 0 for never."""

    load_s: float
    idle_s: float = 60.0
    users: int = 10
    burst: int = 3 * (RUNNING + QUEUED)
    sample_s: float = 5.0
    burst_s: float = 60.0
    control_s: float = 10.0
    kill_s: float = 0.0
    seed: int = 0
    gpu: bool = False


@dataclass
class Soaked:
    """What came of it."""

    ledger: Ledger
    sampler: Sampler
    stats: StatsReply
    wrong: list[str]  # of the books
    before: dict[str, tuple[int, int]]  # files and threads of each process
    after: dict[str, tuple[int, int]]
    idle_percent: float  # of one core
    kills: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> list[str]:
        """Every mark that was missed."""
        kept = [
            f"{name} has {now[0]} files and {now[1]} threads, {then[0]} and {then[1]} before the load"
            for name, now in self.after.items()
            if (then := self.before.get(name, now)) and (now[0] > then[0] or now[1] > then[1] + POOL_THREADS)
            if not self.kills
        ]
        idle = [f"{self.idle_percent:.1f} % of a core idle"] if self.idle_percent >= MARK_PERCENT else []
        return [*self.wrong, *self.ledger.faults, *growing(self.sampler.series), *kept, *idle]


async def soak(engine: Engine, plan: Plan, sizes: Sizes) -> Soaked:
    """Load, rest, and the reckoning. The engine has served nobody yet."""
    ledger = Ledger(kills=plan.kill_s > 0)
    users = Users(engine.endpoint, engine.url, sizes, ledger)
    await users.control()  # alone and cold: what all later ones are compared to
    await _some(users, plan, 2.0)  # whatever is made at first use is there
    await at_rest(engine)
    before = open_things(engine)
    sampler = Sampler(engine, plan.gpu)
    kills = await _load(engine, users, plan, sampler)
    await at_rest(engine)
    idle_percent = await _rest(engine, plan.idle_s)
    after = open_things(engine)
    stats = await at_rest(engine)
    lines = request_lines(engine.errors)
    wrong = mistakes(ledger.asked, lines, stats, ledger.kills)
    ends = Counter(line.end for line in lines)
    return Soaked(ledger, sampler, stats, wrong, before, after, idle_percent, kills, ends)


async def _some(users: Users, plan: Plan, seconds: float) -> None:
    end = asyncio.Event()
    tasks = [asyncio.create_task(users.user(plan.seed - 1 - i, end)) for i in range(plan.users)]
    await asyncio.sleep(seconds)
    end.set()
    await asyncio.gather(*tasks)
    await users.burst(plan.burst, plan.seed - 1)


async def _load(engine: Engine, users: Users, plan: Plan, sampler: Sampler) -> int:
    """The load, for as long as planned; how many processes were killed."""
    end = asyncio.Event()
    kills = 0

    async def sample() -> None:
        await asyncio.to_thread(sampler.sample)
        with contextlib.suppress(SlotstreamError):
            async with Client(engine.endpoint) as client:
                stats = await client.stats()
            sampler.add("scheduler", "pages held", stats.kv_pages_total - stats.kv_pages_available)

    async def kill() -> None:
        nonlocal kills
        name = KILLED[kills % len(KILLED)]
        kills += 1
        engine.child(name).send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        await asyncio.to_thread(engine.wait_serving_again, kills)

    bursts = iter(range(plan.seed + 1000, sys.maxsize))
    beside = [
        _every(plan.sample_s, sample, end),
        _every(plan.burst_s, lambda: users.burst(plan.burst, next(bursts)), end),
        _every(plan.control_s, users.control, end),
        *([_every(plan.kill_s, kill, end)] if plan.kill_s else []),
    ]
    tasks = [asyncio.create_task(each) for each in beside]
    tasks += [asyncio.create_task(users.user(plan.seed + i, end)) for i in range(plan.users)]
    await asyncio.wait(tasks, timeout=plan.load_s, return_when=asyncio.FIRST_EXCEPTION)
    end.set()
    await asyncio.gather(*tasks)
    return kills


async def _every(seconds: float, act: Callable[[], Awaitable[None]], end: asyncio.Event) -> None:
    """Do `act` every so often, until `end`."""
    while not end.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await end.wait()
                return
        await act()


async def at_rest(engine: Engine, within_s: float = 60.0) -> StatsReply:
    """The counters once nothing runs or waits, or those after `within_s`."""
    end_s = time.monotonic() + within_s
    async with Client(engine.endpoint) as client:
        while True:
            stats = await client.stats()
            rests = not (stats.running or stats.waiting)
            held = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
            if (rests and not held) or time.monotonic() > end_s:
                return stats
            await asyncio.sleep(0.1)


def open_things(engine: Engine) -> dict[str, tuple[int, int]]:
    """Files (handles on Windows) and threads of each process."""
    found = {}
    for name, process in processes(engine).items():
        files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
        found[name] = (files, process.num_threads())
    return found


async def _rest(engine: Engine, idle_s: float) -> float:
    """Percent of one core that all processes take together while nobody asks."""
    await asyncio.sleep(min(2.0, idle_s))
    watched = processes(engine)
    start_s, then = time.perf_counter(), busy_s(watched)
    await asyncio.sleep(idle_s)
    now = busy_s(watched)
    return 100 * sum(now[name] - then[name] for name in now) / (time.perf_counter() - start_s)
