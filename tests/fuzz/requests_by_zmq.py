"""Requests as any local process may send them to the scheduler: exactly one final reply each, and no internal error."""

from typing import Any

import msgspec
import zmq
import zmq.asyncio

from scheduler.protocol import FINAL, Failed, Reply, Request
from tests.fuzz.frames import sample
from tests.fuzz.live_engine import LiveEngine
from tests.fuzz.source import Source, changed

TYPE = msgspec.inspect.type_info(Request)
DECODER = msgspec.msgpack.Decoder(Reply)
GENERATE = {
    "type": "Generate",
    "token_ids": [5, 6],
    "sampling": {"max_tokens": 2, "stop": ["x"], "n": 1, "logprobs": 2},
}
NUMBER = b"12345678"


def one_input(data: bytes) -> None:
    source = Source(data)
    base: Any = GENERATE if source.byte() & 1 else sample(source, TYPE)
    try:
        frame = msgspec.msgpack.encode(changed(source, base))
    except (OverflowError, UnicodeEncodeError):
        return
    engine = LiveEngine.running()
    last = engine.over(_final(engine.rig.engine.endpoint, frame))
    assert not isinstance(last, Failed) or last.code != "internal", last


async def _final(endpoint: str, frame: bytes) -> Any:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(endpoint)
        await peer.send_multipart([NUMBER, frame])
        while True:
            number, reply = await peer.recv_multipart()
            assert number == NUMBER
            message = DECODER.decode(reply)
            if isinstance(message, FINAL):
                return message
