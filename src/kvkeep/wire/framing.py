"""Frames: a u32 little-endian length, then one msgpack message. Sans-I/O.

A frame over the limit, or one that does not decode, is a ProtocolError: that connection ends with
the reason. Nothing is ever unpickled.
"""

from typing import Generic, TypeVar

import msgspec

from kvkeep.errors import ProtocolError
from kvkeep.wire.messages import ClientMessage, ServerMessage

MAX_FRAME_BYTES = 8 << 20
_HEADER_BYTES = 4

M = TypeVar("M")


class FrameReader(Generic[M]):
    """Turns received bytes into messages of the union it was made for."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], max_bytes: int) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages that are complete now. After a ProtocolError the reader is useless."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + _HEADER_BYTES], "little")
            if size > self._max_bytes:
                raise ProtocolError(
                    f"a frame of {size} bytes is over the limit of {self._max_bytes}: "
                    "the peer does not speak the kvkeep protocol"
                )
            end = start + _HEADER_BYTES + size
            if len(buffer) < end:
                break
            messages.append(self._decode(bytes(buffer[start + _HEADER_BYTES : end])))
            start = end
        del buffer[:start]
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame does not decode: {error}") from error


def client_frames(max_bytes: int = MAX_FRAME_BYTES) -> FrameReader[ClientMessage]:
    """Reader of what clients send (used by the server)."""
    return FrameReader(msgspec.msgpack.Decoder(ClientMessage), max_bytes)


def server_frames(max_bytes: int = MAX_FRAME_BYTES) -> FrameReader[ServerMessage]:
    """Reader of what the server sends (used by clients)."""
    return FrameReader(msgspec.msgpack.Decoder(ServerMessage), max_bytes)


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """One message as a frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_HEADER_BYTES, "little") + body
