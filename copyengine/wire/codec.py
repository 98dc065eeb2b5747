"""Frames to messages and back: MessagePack, tagged Structs, one typed decoder per direction."""

from typing import Any, Generic, TypeVar

import msgspec

from copyengine.wire.errors import WireError

M = TypeVar("M")

MAX_FRAME_NBYTES = 64 * 2**20
"""Frames above this are dropped by the socket itself (ZMQ_MAXMSGSIZE); a prompt of 1 M token ids takes 5 MB."""


MAX_REASON_CHARS = 300
"""Of what the decoder says is wrong: it quotes the frame, which would come back whole, in a log line and a reply."""


class Codec(Generic[M]):
    """Decodes one union of Structs, encodes anything."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Any) -> bytes:
        """One frame. WireError if it would be too long, or a value has no form in it: an int over 64 bits, say."""
        try:
            frame = self._encoder.encode(message)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise WireError(str(error)) from None
        if len(frame) > MAX_FRAME_NBYTES:
            raise WireError(f"it takes {len(frame)} bytes, and a message may have {MAX_FRAME_NBYTES}")
        return frame

    def decode(self, frame: bytes) -> M:
        """The message in `frame`. WireError if it is malformed or of no type of the union."""
        try:
            return self._decoder.decode(frame)  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(str(error)[:MAX_REASON_CHARS]) from None
