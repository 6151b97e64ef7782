"""Messages arrive as they were sent, however the stream is cut; their encoding is frozen."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.samples import CLIENT_TYPES, OLD, SAMPLES, SERVER_TYPES, messages, values

from kvkeep.wire import messages as m
from kvkeep.wire.framing import FrameReader, client_frames, encode, server_frames


def reader_of(kind: type[Any]) -> FrameReader[Any]:
    return client_frames() if kind in CLIENT_TYPES else server_frames()


def feed_in_parts(reader: FrameReader[Any], stream: bytes, cuts: list[int]) -> list[Any]:
    """Feed the stream cut at these places."""
    got: list[Any] = []
    start = 0
    for end in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        got += reader.feed(stream[start:end])
        start = end
    return got


@pytest.mark.parametrize("kind", CLIENT_TYPES + SERVER_TYPES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_each_message_comes_back(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    reader = reader_of(kind)
    assert reader.feed(encode(message)) == [message]
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("kinds", [CLIENT_TYPES, SERVER_TYPES], ids=["client", "server"])
@given(data=st.data())
def test_a_stream_may_be_cut_anywhere(kinds: tuple[type[Any], ...], data: st.DataObject) -> None:
    sent = data.draw(st.lists(messages(kinds), max_size=6))
    cuts = data.draw(st.lists(st.integers(0, 4_000), max_size=12))
    stream = b"".join(map(encode, sent))
    reader = reader_of(kinds[0])
    assert feed_in_parts(reader, stream, cuts) == sent
    assert reader.pending_bytes == 0


@given(messages(CLIENT_TYPES))
def test_byte_by_byte(message: Any) -> None:
    reader = client_frames()
    frame = encode(message)
    for at in range(len(frame) - 1):
        assert reader.feed(frame[at : at + 1]) == []
        assert reader.pending_bytes == at + 1
    assert reader.feed(frame[-1:]) == [message]


@pytest.mark.parametrize(
    ("message", "frame"), SAMPLES, ids=[type(sample[0]).__name__ for sample in SAMPLES]
)
def test_the_encoding_is_frozen(message: Any, frame: str) -> None:
    """A change here is a change of the protocol: it needs a new number in `VERSIONS`."""
    assert encode(message).hex() == frame
    assert reader_of(type(message)).feed(bytes.fromhex(frame)) == [message]


@pytest.mark.parametrize(("message", "frame"), OLD, ids=[type(old[0]).__name__ for old in OLD])
def test_a_frame_from_before_the_last_fields_still_decodes(message: Any, frame: str) -> None:
    assert reader_of(type(message)).feed(bytes.fromhex(frame)) == [message]


def test_every_message_is_frozen() -> None:
    assert {type(message) for message, _ in SAMPLES} == {*CLIENT_TYPES, *SERVER_TYPES}
    assert m.VERSIONS == (2, 1)


def test_fields_added_later_are_ignored_and_missing_ones_get_defaults() -> None:
    """What lets protocol N and N-1 talk: an array may be longer or shorter at its end."""
    ping = msgspec.msgpack.encode(["ping", 7, 0.5, "from the future"])
    short = msgspec.msgpack.encode(["ping", 7])
    frames = b"".join(len(body).to_bytes(4, "little") + body for body in (ping, short))
    assert client_frames().feed(frames) == [m.Ping(7, 0.5), m.Ping(7, 0.0)]
