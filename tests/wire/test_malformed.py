"""Bytes that are no message end in a ProtocolError with a reason, never in anything else."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.samples import CLIENT_TYPES, messages

from kvkeep.errors import ProtocolError
from kvkeep.wire import messages as m
from kvkeep.wire.framing import (
    MAX_FRAME_BYTES,
    client_frames,
    encode,
    server_frames,
)

SYSTEM_CALL = b"cposix\nsystem\n(S'exit 1'\ntR."  # what an unpickler would run


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def text(word: bytes) -> bytes:
    return bytes([0xA0 + len(word)]) + word


def body_of(message: m.ClientMessage) -> bytes:
    return encode(message)[4:]


BODIES = {
    "empty": b"",
    "nil": b"\xc0",
    "a number": b"\x07",
    "a map": b"\x81\xa4type\xa3bye",
    "no tag": b"\x90",
    "the tag is a number": b"\x91\x01",
    "unknown tag": b"\x91" + text(b"evil"),
    "a server's message": encode(m.Pong(1))[4:],
    "too few fields": b"\x92" + text(b"lookup") + b"\x01",
    "text for a number": b"\x92" + text(b"ping") + text(b"one"),
    "infinity for a number": b"\x92" + text(b"ping") + b"\xcb\x7f\xf0" + b"\0" * 6,
    "bytes for text": b"\x94" + text(b"lookup") + b"\x01\xc4\x01r\xc4\x00",
    "text for bytes": b"\x94" + text(b"lookup") + b"\x01" + text(b"r") + text(b"h"),
    "text that is no UTF-8": b"\x94" + text(b"lookup") + b"\x01" + text(b"\xff\xfe") + b"\xc4\x00",
    "an unknown role": b"\x94" + text(b"hello") + b"\x91\x01" + text(b"s") + b"\x63",
    "an unknown outcome": b"\x94" + text(b"end") + b"\x01\x91\x00\x63",
    "something after it": body_of(m.Bye()) + b"\x01",
    "cut short": body_of(m.Lookup(1, "r", b"h" * 64))[:-1],
    "a tuple of four billion": b"\x93" + text(b"commit") + b"\x01\xdd\xff\xff\xff\xff",
    "bytes of four billion": b"\x94"
    + text(b"lookup")
    + b"\x01"
    + text(b"r")
    + b"\xc6"
    + b"\xff" * 4,
    "a message of four billion fields": b"\xdd\xff\xff\xff\xff" + text(b"bye"),
    "nested too deep": b"\x92" + text(b"bye") + b"\x91" * 100_000 + b"\x01",
    "nested too deep in maps": b"\x92" + text(b"bye") + b"\x81\x01" * 100_000 + b"\x01",
    "an extension": b"\x92" + text(b"ping") + b"\xd4\x01\x01",
    "never used": b"\xc1",
    "a pickle": SYSTEM_CALL,
    "a binary pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x93.",
    "json": b'["bye"]',
}

STREAMS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030102000100fc0303"),
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a pickle": SYSTEM_CALL,
    "one byte over the limit": (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    "the longest length": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_message(body: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^a frame does not decode: "):
        client_frames().feed(framed(body))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_another_protocol(stream: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"over the limit of .*kvkeep protocol"):
        client_frames().feed(stream)


def test_the_limit_is_the_readers_own() -> None:
    message = m.Note("r", "x" * 100)
    frame = encode(message)
    assert client_frames(max_bytes=len(frame) - 4).feed(frame) == [message]
    with pytest.raises(ProtocolError, match="over the limit"):
        client_frames(max_bytes=len(frame) - 5).feed(frame)


def test_an_oversized_frame_is_refused_before_it_arrives() -> None:
    """The length alone is enough: nothing is collected first."""
    reader = client_frames(max_bytes=1000)
    with pytest.raises(ProtocolError):
        reader.feed((1001).to_bytes(4, "little"))


def test_a_frame_cut_short_is_only_pending() -> None:
    """More may come; that nothing comes is seen by the connection's end, not here."""
    reader = client_frames()
    assert reader.feed(encode(m.Ping(1))[:-1]) == []
    assert reader.pending_bytes == len(encode(m.Ping(1))) - 1


def test_messages_go_one_way() -> None:
    with pytest.raises(ProtocolError):
        server_frames().feed(encode(m.Ping(1)))


@given(st.binary(max_size=300))
def test_garbage_never_raises_anything_else(stream: bytes) -> None:
    feed_or_refuse(stream)
    feed_or_refuse(framed(stream))


@given(messages(CLIENT_TYPES), st.data())
def test_a_changed_byte_never_raises_anything_else(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    feed_or_refuse(bytes(frame))


def feed_or_refuse(stream: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        for message in client_frames().feed(stream):
            assert isinstance(message, CLIENT_TYPES)
