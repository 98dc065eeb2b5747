"""Frames against themselves (round trip), and against anything that is none."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.protocol import Attach, CopyCounters, Load, MemoryHandle, Reply, Request, StatsReply, Wake
from copyengine.wire.codec import MAX_REASON_CHARS, Codec
from copyengine.wire.errors import WireError

names = st.from_regex(r"\A[A-Za-z0-9._-]{1,64}\Z")
counts = st.integers(1, 2**63 - 1)
handle = st.builds(MemoryHandle, st.just("shm"), names, counts)
messages = st.one_of(
    st.builds(Load, st.text(), st.sampled_from(["bfloat16", "float16", "float32"]), st.text()),
    st.builds(Attach, st.text(), handle, handle, handle, counts),
    st.builds(Wake, st.text()),
)


@given(messages)
def test_round_trip(message: Request) -> None:
    codec: Codec[Request] = Codec(Request)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("value", [2**70, "\udcff", object()])
def test_what_no_frame_can_hold_is_a_wire_error(value: object) -> None:
    with pytest.raises(WireError):
        Codec[Request](Request).encode([value])


@given(st.binary(max_size=64))
def test_junk_is_a_wire_error(frame: bytes) -> None:
    """Random bytes never decode to a message, nor to any other exception."""
    with pytest.raises(WireError):
        Codec[Request](Request).decode(frame)


@given(messages, st.data())
def test_a_cut_or_lengthened_frame_is_a_wire_error(message: Request, data: st.DataObject) -> None:
    codec: Codec[Request] = Codec(Request)
    frame = codec.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], frame + b"\x00"):
        with pytest.raises(WireError):
            codec.decode(wrong)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Unknown"},
        {"type": "StatsReply"},
        {"type": "Wake"},
        {"type": "Wake", "worker": 3},
        {"type": "Load", "model": "m", "dtype": "int4"},
        {"worker": "w"},
        {"type": b"\xff"},
        [],
    ],
)
def test_well_formed_frames_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(WireError):
        Codec[Request](Request).decode(msgspec.msgpack.encode(value))


def test_text_that_is_no_utf8_and_bottomless_nesting() -> None:
    for frame in (b"\x81\xa4type\xa4\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa1x" * 100_000):
        with pytest.raises(WireError):
            Codec[Reply](Reply).decode(frame)


@pytest.mark.parametrize("value", [{"type": "x" * 10**6}, {"type": "x" * 10**6 + "\n"}])
def test_what_is_said_of_a_frame_does_not_repeat_it(value: object) -> None:
    """Against the bound: a decoder that quotes the frame would send a megabyte back."""
    with pytest.raises(WireError) as dropped:
        Codec[Request](Request).decode(msgspec.msgpack.encode(value))
    assert len(str(dropped.value)) == MAX_REASON_CHARS


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_length_that_the_frame_does_not_have_allocates_nothing(head: bytes) -> None:
    """An array, a map, text, bytes and an extension of 2^32 - 1, as a field that is known and as one that is not."""
    for field in (b"worker", b"nobody"):
        frame = b"\x82\xa4type\xa4Wake\xa6" + field + head + b"\xff\xff\xff\xff"
        tracemalloc.start()
        with pytest.raises(WireError):
            Codec[Request](Request).decode(frame)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_nbytes < 1_000_000


def test_a_peer_that_knows_one_field_more_or_less_is_understood() -> None:
    """Fields with defaults may be absent, unknown ones are skipped."""
    codec: Codec[Reply] = Codec(Reply)
    none = CopyCounters()
    value = msgspec.msgpack.decode(codec.encode(StatsReply(none, none, none, 0, [], 0, False)))
    del value["malformed_records"]
    decoded = codec.decode(msgspec.msgpack.encode(value | {"from_the_future": 1}))
    assert isinstance(decoded, StatsReply) and decoded.malformed_records == 0
