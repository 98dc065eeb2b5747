"""Frames of the three protocols, requests and replies, and the lines of the pipes between a parent and its children.

What is decoded encodes to what decodes to the same; all else is a WireError, or no event and no order.
"""

from typing import Any

import msgspec
from msgspec import inspect

import copyengine.protocol as copies
import scheduler.protocol as serving
import worker.protocol as steps
from copyengine.wire.codec import Codec
from copyengine.wire.errors import WireError
from copyengine.wire.lifecycle import (
    Event,
    Joined,
    Listening,
    PeerLost,
    Progress,
    Ready,
    StartFailed,
    parse_event,
    parse_order,
)
from tests.fuzz.source import Source, changed, damaged

UNIONS: list[Any] = [
    *(serving.Request, serving.Reply, steps.Request, steps.Reply, copies.Request, copies.Reply),
]
CODECS: list[Codec[Any]] = [Codec(union) for union in UNIONS]
TYPES = [inspect.type_info(union) for union in UNIONS]
EVENTS: list[Event] = [
    Listening("tcp://127.0.0.1:1"),
    Progress("experts", 1, 2),
    Ready({"a": 1}),
    StartFailed("config", "x"),
    Joined("worker0", "tcp://127.0.0.1:1"),
    PeerLost("worker0", "tcp://127.0.0.1:1", "config", "x"),
]
ORDERS = (b"drain\n", b"peer worker0 tcp://127.0.0.1:1\n", b"\n", b"peer\n")


def one_input(data: bytes) -> None:
    source = Source(data)
    kind = source.below(len(CODECS) + 1)
    if kind == len(CODECS):
        return _line(source)
    codec = CODECS[kind]
    try:
        frame = msgspec.msgpack.encode(changed(source, sample(source, TYPES[kind])))
    except (OverflowError, UnicodeEncodeError):  # no frame has such a value
        return
    if source.byte() < 48:
        frame = damaged(source, frame)
    _decoded(codec, frame)


def _decoded(codec: Codec[Any], frame: bytes) -> None:
    try:
        message = codec.decode(frame)
    except WireError as error:
        assert len(str(error)) <= 300
        return
    again = codec.encode(message)
    assert codec.encode(codec.decode(again)) == again


def _line(source: Source) -> None:
    if source.byte() & 1:
        parse_event(damaged(source, msgspec.json.encode(source.pick(EVENTS))))
        parse_event(source.rest())
    else:
        parse_order(damaged(source, source.pick(ORDERS)))
        parse_order(source.rest())


def sample(source: Source, kind: inspect.Type) -> Any:
    """A value that the decoder takes for `kind`, as lists, dicts and the like."""
    match kind:
        case inspect.UnionType(types=types):
            return sample(source, source.pick(types))
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            values = {field.encode_name: sample(source, field.type) for field in fields if source.byte() < 160}
            values |= {
                f.encode_name: sample(source, f.type) for f in fields if f.required and f.encode_name not in values
            }
            return {tag_field: tag, **values} if tag_field else values
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [sample(source, item) for _ in range(source.byte() % 3)]
        case inspect.TupleType(item_types=items):
            return [sample(source, item) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(source, key): sample(source, value)}
        case inspect.LiteralType(values=literals):
            return source.pick(literals)
        case inspect.IntType(ge=least):
            return (least or 0) + source.byte() % 9
        case inspect.FloatType():
            return source.byte() / 16
        case inspect.BoolType():
            return bool(source.byte() & 1)
        case inspect.BytesType():
            return source.chunk()
        case inspect.StrType():
            return source.chunk().decode("latin-1")
    return None
