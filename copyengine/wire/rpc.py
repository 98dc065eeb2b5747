"""Request and reply over ZMQ: any number of progress replies, then exactly one final reply per request.

A request is two frames from a DEALER socket: an 8-byte call number chosen by the client, and the message. Each reply
carries the same call number. The server's handler returns the final reply, so that there cannot be two or none.
Frames that are malformed, oversized or unknown are counted and dropped; only where the call number is readable does
the sender learn of it, by a Failed("wire").
"""

from typing import Protocol, TypeVar

import zmq

Req = TypeVar("Req")
Rep = TypeVar("Rep")

CALL_NBYTES = 8
"""Of a call's number, with which each of its replies begins."""

MORE, LAST = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)
"""Flags of a frame; ints, for joining two of pyzmq's takes as long as sending."""


class Failure(Protocol):
    """What every protocol's Failed has."""

    @property
    def code(self) -> str: ...

    @property
    def detail(self) -> str: ...
