"""The client command at something that is no engine, or one that answers what it should not: one line, exit code 1."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from copyengine.wire.codec import MAX_FRAME_NBYTES
from scheduler.protocol import Accepted, Done, HealthReply
from tests.e2e.engine import ROOT

HEALTHY = HealthReply(ready=True, phase="ready", model="m")
encode = msgspec.msgpack.encode


@contextmanager
def answering(*answers: list[bytes]) -> Iterator[str]:
    """A ROUTER that says it is ready, and to the next request each of `answers`; its endpoint."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, 20_000
        router.bind("tcp://127.0.0.1:0")

        def serve() -> None:
            peer, number, _ = router.recv_multipart()
            router.send_multipart([peer, number, encode(HEALTHY)])
            peer, number, _ = router.recv_multipart()
            for frames in answers:
                router.send_multipart([peer, number, *frames])

        server = threading.Thread(target=serve)
        server.start()
        yield router.getsockopt_string(zmq.LAST_ENDPOINT)
        server.join(20)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([[b"\xc1"], [encode(Done())]], "answered with Done"),
        ([[encode(Accepted("r", 1))], [encode(HEALTHY)]], "answered with HealthReply"),
        ([[bytes(MAX_FRAME_NBYTES + 1)]], "is gone: its connection closed"),
    ],
    ids=["junk, then a reply to something else", "accepted, then a reply to something else", "too long"],
)
def test_what_is_no_answer_is_one_line(answers: list[list[bytes]], says: str) -> None:
    with answering(*answers) as endpoint:
        argv = [sys.executable, "-m", "scheduler.client", "hi", "--endpoint", endpoint]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    error = [line for line in done.stderr.splitlines() if not line.startswith("event=reply_refused ")]
    assert len(error) == 1 and error[0].startswith("error: ") and says in error[0], done.stderr
