"""The hop of a token as mini-sglang makes it, rebuilt here in a few lines to compare with.

There a token goes scheduler -> detokenizer -> API server through ZMQ PUSH/PULL sockets: dataclasses, turned into
dictionaries that name their class field by field, packed by msgpack, unpacked and looked up by class name at the other
end (its message/ and utils/mp.py). A batch's messages are one message of a list. The API server's end wakes a coroutine
for each request. Detokenising itself, HTTP and the scheduler's other work are left out, so that this is the hop alone.
"""

import asyncio
import importlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
import zmq.asyncio


@dataclass
class DetokenizeMsg:
    uid: int
    next_token: int
    finished: bool


@dataclass
class UserReply:
    uid: int
    incremental_output: str
    finished: bool


@dataclass
class Batch:
    data: list[Any]


CLASSES: dict[str, Callable[..., Any]] = {each.__name__: each for each in (DetokenizeMsg, UserReply, Batch)}
WARM_UP_STEPS = 50


def pack(message: Any) -> bytes:
    packed: bytes = _msgpack().packb(_to_dict(message), use_bin_type=True)
    return packed


def unpack(frame: bytes) -> Any:
    return _from_dict(_msgpack().unpackb(frame, raw=False))


def _msgpack() -> Any:
    return importlib.import_module("msgpack")


def _to_dict(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_dict(each) for each in value]
    if isinstance(value, int | float | str | bytes | bool | None):
        return value
    return {"__type__": type(value).__name__} | {name: _to_dict(field) for name, field in vars(value).items()}


def _from_dict(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_dict(each) for each in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _from_dict(field) for name, field in value.items() if name != "__type__"}
    return CLASSES[value["__type__"]](**fields)


def detokenize(source: str, target: str) -> None:
    """The process in the middle: every token becomes a text of its own."""
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(source)
    push.connect(target)
    while True:
        messages = unpack(pull.recv()).data
        push.send(pack(Batch([UserReply(each.uid, " text", each.finished) for each in messages])), copy=False)


def receive(report: str, requests: int) -> None:
    """The API server: each request's coroutine waits for its event and takes what has come. Reports where it listens,
    and whenever all requests have finished."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        pull, done = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        done.connect(report)
        await done.send(b"tcp://127.0.0.1:%d" % pull.bind_to_random_port("tcp://127.0.0.1"))
        events = [asyncio.Event() for _ in range(requests)]
        pieces: list[list[UserReply]] = [[] for _ in range(requests)]

        async def take(uid: int) -> None:
            while True:
                await events[uid].wait()
                events[uid].clear()
                if pieces[uid][-1].finished and uid == requests - 1:
                    await done.send(b"")
                pieces[uid].clear()

        takers = [asyncio.create_task(take(uid)) for uid in range(requests)]
        while takers:
            for reply in unpack(await pull.recv()).data:
                pieces[reply.uid].append(reply)
                events[reply.uid].set()

    asyncio.run(main())


@dataclass(frozen=True)
class Hop:
    """Microseconds of processor time for a token in each of the three processes, and tokens a second through all."""

    sender_us: float
    detokenizer_us: float
    receiver_us: float
    tokens_per_s: float


def measure(requests: int, steps: int) -> Hop:
    """`steps` steps with a token for each of `requests` requests. ImportError without msgpack."""
    _msgpack()
    spawn = multiprocessing.get_context("spawn")
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as done:
        done.setsockopt(zmq.RCVTIMEO, 60_000)
        source, report = (f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}" for s in (push, done))
        last = spawn.Process(target=receive, args=(report, requests), daemon=True)
        last.start()
        middle = spawn.Process(target=detokenize, args=(source, done.recv_string()), daemon=True)
        middle.start()
        try:
            _send(push, done, requests, WARM_UP_STEPS)
            processes = [psutil.Process(pid) for pid in (None, middle.pid, last.pid)]
            before, start_s = [_cpu_s(process) for process in processes], time.perf_counter()
            _send(push, done, requests, steps)
            wall_s = time.perf_counter() - start_s
            spent = [_cpu_s(process) - then for process, then in zip(processes, before, strict=True)]
        finally:
            for process in (middle, last):
                process.kill()
                process.join()
    tokens = requests * steps
    sender_us, detokenizer_us, receiver_us = (1e6 * seconds / tokens for seconds in spent)
    return Hop(sender_us, detokenizer_us, receiver_us, tokens / wall_s)


def _send(push: "zmq.Socket[bytes]", done: "zmq.Socket[bytes]", requests: int, steps: int) -> None:
    """All steps as fast as they go; returns when the last has arrived."""
    for step in range(1, steps + 1):
        messages = [DetokenizeMsg(uid, 1000 + uid, step == steps) for uid in range(requests)]
        push.send(pack(Batch(messages)), copy=False)
    done.recv()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
