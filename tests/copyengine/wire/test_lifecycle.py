"""Events against themselves, and a real child whose parent speaks, leaves, or never listens."""

import signal
import subprocess
import sys
from typing import Any

import pytest

from copyengine.wire.lifecycle import (
    LINE_NBYTES,
    Alive,
    Event,
    Joined,
    Listening,
    Order,
    Peer,
    PeerLost,
    Progress,
    Ready,
    StartFailed,
    order_line,
    parse_event,
    parse_order,
)

EVENTS: list[Event] = [
    Listening("tcp://127.0.0.1:1"),
    Progress("experts", 1, 2**40),
    Ready({"slots": 3, "share": 0.5, "thread": True, "name": "a\nb"}),
    StartFailed("config", "--slots 0: too few\nsecond line, ümlaut"),
    Joined("worker1", "tcp://127.0.0.1:2"),
    PeerLost("worker1", "tcp://127.0.0.1:2", "peer_timeout", "a step took too long"),
    Alive(),
]

ANNOUNCE = """
import sys, msgspec
from copyengine.wire.lifecycle import *
for line in sys.stdin.buffer:
    announce(msgspec.json.decode(line, type=Event))
"""

WATCH = """
import threading
from copyengine.wire import lifecycle
lifecycle.STOP_GRACE_S = 0.3
done = threading.Event()
def told(command):
    print(command, flush=True)
    if command == "stop" and not {stubborn}:
        done.set()
lifecycle.watch_parent(told)
print("watching", flush=True)
done.wait()
"""


def child(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_events_are_one_line_each_and_come_back() -> None:
    """Through a real pipe; what they hold may contain line breaks."""
    import msgspec

    process = child(ANNOUNCE)
    stdout, _ = process.communicate(b"\n".join(msgspec.json.encode(event) for event in EVENTS), timeout=30)
    assert [parse_event(line) for line in stdout.splitlines()] == EVENTS


@pytest.mark.parametrize("line", [b"", b"\n", b"a library's greeting", b"{}", b'{"type":"Other"}', b"\xff\xfe", b"[1]"])
def test_other_lines_are_no_events(line: bytes) -> None:
    assert parse_event(line) is None


def test_announcing_to_nobody_is_no_error() -> None:
    process = child("import sys\n" + ANNOUNCE.replace("announce(", "sys.stdin.buffer.read(0); announce("))
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write(b'{"type":"Listening","endpoint":"x"}\n' * 3)
    process.stdin.close()
    assert process.wait(30) in (0, 120)  # 120: Python's own last flush met the closed pipe


ORDERS: list[tuple[bytes, Order | None]] = [
    (b"drain", "drain"),
    (b" drain \r", "drain"),
    (b"alive", "alive"),
    (b"alive worker0", None),
    (b"peer worker1 tcp://127.0.0.1:5801", Peer("worker1", "tcp://127.0.0.1:5801")),
    (b"", None),
    (b"stop", None),
    (b"drain now", None),
    (b"peer", None),
    (b"peer worker1", None),
    (b"peer worker1 tcp://127.0.0.1:1 more", None),
    (b"peer w\xfcrker tcp://127.0.0.1:1", None),
    (b"\x00\xff", None),
]


@pytest.mark.parametrize(("line", "order"), ORDERS)
def test_a_line_is_an_order_or_nothing(line: bytes, order: Order | None) -> None:
    assert parse_order(line) == order


@pytest.mark.parametrize("order", ["drain", "alive", Peer("worker0", "tcp://127.0.0.1:65535")])
def test_an_order_comes_back_from_its_line(order: Any) -> None:
    assert parse_order(order_line(order).removesuffix(b"\n")) == order


def test_orders_come_through_whatever_is_between_them() -> None:
    """In pieces, behind junk, and behind a line that is too long, of which the end looks like an order."""
    process = child(WATCH.format(stubborn=False))
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"watching\n"
    for piece in (b"\xff\npeer worker0 tcp://12", b"7.0.0.1:1\npe", b"er a b\n", b"x" * (LINE_NBYTES + 1), b" drain\n"):
        process.stdin.write(piece)
        process.stdin.flush()
    process.stdin.write(b"x" * 3 * LINE_NBYTES + b"\ndrain\n")
    stdout, _ = process.communicate(timeout=30)
    assert stdout.splitlines() == [
        b"Peer(name='worker0', endpoint='tcp://127.0.0.1:1')",
        b"Peer(name='a', endpoint='b')",
        b"drain",
        b"stop",
    ]


def test_drain_then_stop() -> None:
    """Lines in pieces, unknown ones between; the end of input is the stop."""
    process = child(WATCH.format(stubborn=False))
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"watching\n"
    for piece in (b"noise\ndr", b"ain\r\n", b"drained\n"):
        process.stdin.write(piece)
        process.stdin.flush()
    assert process.stdout.readline() == b"drain\n"
    stdout, _ = process.communicate(timeout=30)
    assert (stdout, process.returncode) == (b"stop\n", 0)


def test_an_interrupt_is_the_parents_business() -> None:
    process = child(WATCH.format(stubborn=False))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert (stdout, process.returncode) == (b"stop\n", 0)


def test_who_does_not_stop_is_ended() -> None:
    process = child(WATCH.format(stubborn=True))
    assert process.stdout is not None
    process.stdout.readline()
    stdout, _ = process.communicate(timeout=30)
    assert (stdout, process.returncode) == (b"stop\n", 1)
