"""One worker and its requests: runs the steps that the core plans, and hands out what they yield."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Protocol

from copyengine.wire.errors import PeerDied, PeerTimeout, RequestRefused, SlotstreamError, code_of, unforeseen
from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import Log
from scheduler.core import Core
from scheduler.last_known import LastKnown
from scheduler.protocol import Failed, Finished, Tokens
from scheduler.request import Request
from worker.client import WorkerClient
from worker.protocol import Failed as StepFailed
from worker.protocol import Loaded, ResidencyReply, RunStep, StepDone

STEP_DEADLINE_S = 600.0
"""Seconds a step may take; the longest chunk of a large model on a slow CPU takes minutes. A worker whose copies hang
ends itself after COPY_DEADLINE_S, one whose event loop hangs is killed by --watchdog-s: this is for one that computes
for ever. When they are over its requests end with an error, and another worker is asked for in its place."""

STEP_CODES = ("device_out_of_memory", "copy_damaged")
"""Of failed steps, those that a client is told; of any other one it learns "worker_failed" and the detail."""

log = Log(__name__)


class Outbox(Protocol):
    """Where the replies to one request go."""

    def put_nowait(self, message: Tokens | Finished | Failed) -> None: ...


class Lane:
    """Everything about one worker. `run` is its loop; the other methods are called from other tasks of that loop.

    It dies with its worker, and lives again with the one that is started in its place.
    """

    def __init__(self, name: str, worker: WorkerClient, core: Core, facts: Loaded) -> None:
        """`facts` are what `worker` has allocated."""
        self.name = name
        self.worker = worker
        self.core = core
        self.facts = facts
        self.deaths = 0  # of its workers, one after the other
        self.death = ""  # why it takes no requests any more
        self.broken = False  # it died of an error of this process, not of its worker
        self.loss = ""  # if it died although its worker lives: the code of PeerLost, by which another one is asked for
        self.loading: Progress | None = None  # of the worker that is to take the place of the dead one
        self.resident = 0  # slots of its worker that held an expert after the last step
        self.failed_steps: Counter[str] = Counter()  # by code, of all its workers
        self.residency = _residency_of(worker)
        self._outboxes: dict[int, Outbox] = {}
        self._flushes: list[asyncio.Future[None]] = []  # asked for, and not done
        self._work = asyncio.Event()
        self._lives = asyncio.Event()
        self._lives.set()
        self._dead = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return not self.death

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Queue `request`; `outbox` gets its replies, the final one last."""
        self._outboxes[request.sequence] = outbox
        self.core.submit(request)
        self._work.set()

    def abort(self, request: Request) -> bool:
        """End `request` without another reply; False if it has ended already."""
        if self._outboxes.pop(request.sequence, None) is None:
            return False
        self.core.abort(request)
        self._work.set()
        return True

    async def flush(self) -> None:
        """Have nothing cached and no expert in slots, once the step that is out is back.

        RequestRefused("busy") if a request has come by then. A lane that is down, or dies of it, has nothing anyway.
        """
        if self.alive:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append(done)
            self._work.set()
            await done

    async def revive(self, worker: WorkerClient, core: Core, facts: Loaded) -> None:
        """Go on with `worker`, which has loaded, and the empty `core`; the connection to the old worker is closed."""
        self.worker.lost.set()  # `run` may not have noticed yet
        await self.worker.close()
        await self._dead.wait()
        carry_counters(self.core, core)
        self.worker, self.core, self.facts, self.residency = worker, core, facts, _residency_of(worker)
        self.death, self.broken, self.loss, self.resident = "", False, "", 0
        self._dead.clear()
        self._lives.set()

    async def changed(self) -> None:
        """Returns when it dies, or when it lives again if it is dead."""
        await (self._dead if self.alive else self._lives).wait()

    async def run(self) -> None:
        """Serve until the task is cancelled, with one worker after the other."""
        while True:
            await self._lives.wait()
            await self._live()

    async def _live(self) -> None:
        """Step until the worker dies or the task is cancelled; either way no request is left without a final reply."""
        code, why = "worker_failed", "the worker is gone: its connection closed"
        self.residency.ask(time.monotonic())  # it may be a while until it stands between two steps again
        try:
            while await self._has_work():
                await self._flush()
                step = self.core.plan(time.monotonic())
                await self._step_and_release(step, self.core.take_ended())
        except asyncio.CancelledError:
            code, why = "draining", "the engine is stopping"
            raise
        except PeerDied as error:
            why = str(error)
        except SlotstreamError as error:
            why, self.loss = str(error), code_of(error)
        except Exception as error:
            log.failed("core_failed", error, words=False, worker=self.name)
            self.broken, self.loss = True, "internal"
            why = f"the core loop failed: {unforeseen(error)}"
        finally:
            self.deaths += code != "draining"
            self.death = why
            self._lives.clear()
            self._dead.set()
            for outbox in self._outboxes.values():  # not by way of the core, which may be what failed
                outbox.put_nowait(Failed(code, why))
            self._outboxes.clear()
            self._empty_core()
            self._end_flushes(None)

    def _empty_core(self) -> None:
        """Nothing counts as waiting or running any more. A core that has failed may fail in this too; the next worker
        comes with another one."""
        try:
            self.core.fail_all()
        except Exception as error:
            log.failed("core_not_emptied", error, words=False, worker=self.name)

    async def _has_work(self) -> bool:
        """Waits for something to do; False once the worker is gone."""
        if not self.core.running and not self.core.any_ended and not self._flushes:
            self._work.clear()
            waits = [asyncio.create_task(event.wait()) for event in (self._work, self.worker.lost)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not self.worker.lost.is_set()

    async def _flush(self) -> None:
        if not self._flushes:
            return
        if self.core.flush():
            await self.worker.flush(STEP_DEADLINE_S)
            self.resident = 0
            self._end_flushes(None)
        else:
            self._end_flushes(RequestRefused("busy", "a request came before the flush"))

    def _end_flushes(self, error: RequestRefused | None) -> None:
        asked, self._flushes = self._flushes, []
        for done in asked:
            if done.done():  # who asked has left
                continue
            if error:
                done.set_exception(error)
            else:
                done.set_result(None)

    async def _step_and_release(self, step: RunStep | None, ended: list[int]) -> None:
        """Both at once, so that no step waits for a round trip: the worker hears of what has ended first, and answers
        while it computes. If either fails the other is given up."""
        if step is None or not ended:
            await (self._step(step) if step else self._release(ended))
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._release(ended))
                group.create_task(self._step(step))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _release(self, ended: list[int]) -> None:
        if ended:
            await self.worker.release(ended, STEP_DEADLINE_S)  # a step may hold up what it is beside

    async def _step(self, step: RunStep) -> None:
        match await self._run_step(step):
            case StepDone() as done:
                self.resident = done.resident
                for reply in self.core.apply(done, time.monotonic()):
                    self._deliver(reply.request, reply.message)
            case StepFailed(code="peer_died" | "peer_timeout", detail=detail):
                raise PeerDied(f"the worker cannot go on: {detail}")
            case StepFailed(code="taken_over", detail=detail):
                raise RequestRefused("taken_over", detail)
            case StepFailed(code=code, detail=detail):
                self.failed_steps[code] += 1
                log.warning("step_failed", worker=self.name, mode=step.mode, code=code, detail=detail)
                for request in self.core.fail_step():
                    self._deliver(request, Failed(code if code in STEP_CODES else "worker_failed", detail))

    async def _run_step(self, step: RunStep) -> StepDone | StepFailed:
        try:
            return await self.worker.run_step(step, STEP_DEADLINE_S)
        except PeerTimeout as error:
            tokens = sum(len(sequence.tokens) for sequence in step.sequences)
            raise PeerTimeout(f"a {step.mode} step of {tokens} tokens took too long: {error}") from None
        except RequestRefused as error:  # it cannot be sent: the worker, which knows nothing of it, is well
            return StepFailed(error.code, error.detail)

    def _deliver(self, request: Request, message: Tokens | Finished | Failed) -> None:
        outbox = self._outboxes.get(request.sequence)
        if outbox is None:
            return
        outbox.put_nowait(message)
        if not isinstance(message, Tokens):
            del self._outboxes[request.sequence]


def _residency_of(worker: WorkerClient) -> LastKnown[ResidencyReply]:
    return LastKnown(lambda: worker.residency(STEP_DEADLINE_S))


def carry_counters(old: Core, new: Core) -> None:
    """What is counted since the start goes on in the core that takes another one's place."""
    new.counters.update(old.counters)
    new.cached_tokens, new.queried_tokens, new.preempted = old.cached_tokens, old.queried_tokens, old.preempted


@contextlib.asynccontextmanager
async def running(lanes: list[Lane]) -> AsyncIterator[asyncio.Task[None]]:
    """The lanes' loops run inside. Yields a task that ends once they have `collapsed`."""
    tasks = [asyncio.create_task(lane.run()) for lane in lanes]
    collapse = asyncio.create_task(_collapse(lanes))
    try:
        yield collapse
    finally:
        collapse.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(collapse, *tasks, return_exceptions=True)


def collapsed(lanes: list[Lane]) -> bool:
    """Whether no lane lives and one of them was broken: then this process is to end, and a new one has new cores.

    Lanes whose workers died end nothing: whoever started the workers sees to that, and health says it.
    """
    return any(lane.broken for lane in lanes) and not any(lane.alive for lane in lanes)


async def _collapse(lanes: list[Lane]) -> None:
    while not collapsed(lanes):
        changes = [asyncio.create_task(lane.changed()) for lane in lanes]
        try:
            await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for change in changes:
                change.cancel()
