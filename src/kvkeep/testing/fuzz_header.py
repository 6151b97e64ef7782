"""Fuzz target: the page in front of every stored object, changed in every way.

An input is the page as a reader gets it, of any length. Some are sealed again after the change, so
that what lies behind the page's own checksum is reached too. A page is only ever accepted when it
means exactly what was asked for.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from xxhash import xxh3_128_digest

from kvkeep.backends import header as pages
from kvkeep.backends.base import HEADER_BYTES
from kvkeep.backends.header import Header, HeaderProblem, Seal
from kvkeep.testing.fuzz_values import changed_bytes
from kvkeep.types import ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

_LENGTH = 5000
_FINGERPRINT = Fingerprint(bytes(range(32)))
_SALTS = (None, "", "tenant")
_ASKED = tuple(
    (Namespace(_FINGERPRINT, salt, "model"), ObjectKey(ChunkHash(bytes([n]) * 32), 2, n, 3))
    for n, salt in enumerate(_SALTS)
)
_SEALED = HEADER_BYTES - pages.CHECKSUM_BYTES
_SIZES = (-1, 0, 1, _LENGTH - 1, _LENGTH, _LENGTH + 1, 1 << 40)


class HeaderPage:
    """The target."""

    name = "header"

    def seeds(self) -> Mapping[str, bytes]:
        """One page for each salt, an encrypted one, and one that nobody asked for."""
        found = {
            f"salt-{'none' if space.salt is None else space.salt or 'empty'}": _page(space, key)
            for space, key in _ASKED
        }
        other = Namespace(Fingerprint(b"\xff" * 32), "tenant", "m" * 600)
        seal = Seal(b"n" * pages.NONCE_BYTES, b"c" * pages.KEY_CHECK_BYTES, "key-1")
        found["encrypted"] = _page(*_ASKED[0], seal)
        found["other-layout"] = _page(other, ObjectKey(ChunkHash(b"\0" * 32), 1, 0, 0))
        return found

    def changed(self, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """Some bytes, mostly where the fields are; every second one sealed again."""
        if rng.random() < 0.1:
            other = rng.choice(others)
            cut = rng.randrange(HEADER_BYTES)
            data = data[:cut] + other[cut:]
        start = rng.choice((0, 0, 0, _SEALED - 52))  # where the fields are
        head, some, rest = data[:start], data[start : start + 256], data[start + 256 :]
        spoilt = head + changed_bytes(rng, some) + rest
        new = spoilt if rng.random() < 0.8 else changed_bytes(rng, data)
        if rng.random() < 0.2:
            new = new[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        return _sealed(new) if rng.random() < 0.6 else new

    def run(self, data: bytes) -> frozenset[str]:
        """Decode, and compare with all that could be asked."""
        page = memoryview(data)
        found = pages.decode(page)
        seen = {str(found) if isinstance(found, HeaderProblem) else "decoded"}
        if isinstance(found, Header):
            self._same_when_written_again(found)
        for space, key in _ASKED:
            for size in _SIZES:
                verdict = pages.verdict(page, space, key, length=_LENGTH, size=size)
                seen.add(f"{verdict.outcome.name} {verdict.problem}")
                if verdict.outcome is IoOutcome.OK:
                    assert size == _LENGTH, "accepted with another size"
                    self._means_what_was_asked(verdict.header, space, key)
                    assert data == _sealed(data), "accepted without its seal"
        return frozenset(seen)

    def close(self) -> None:
        """Nothing was started."""

    def _same_when_written_again(self, found: Header) -> None:
        again = bytearray(HEADER_BYTES)
        pages.encode(memoryview(again), found)
        read = pages.decode(memoryview(again))
        assert isinstance(read, Header), "what was accepted cannot be written"
        pair = [repr(_for_programs(one)) for one in (read, found)]
        assert pair[0] == pair[1], "a page that is accepted does not mean what it says"

    def _means_what_was_asked(self, found: Header | None, space: Namespace, key: ObjectKey) -> None:
        assert found is not None, "OK without a header"
        assert found.fingerprint == space.fingerprint
        assert found.salt_digest == pages.salt_digest(space.salt)
        assert found.key == key
        assert found.length == _LENGTH


def _for_programs(found: Header) -> Header:
    """Without the names for people, which need not be text that can be written."""
    seal = found.seal if found.seal is None else replace(found.seal, key_id="")
    return replace(found, model="", seal=seal)


def _page(space: Namespace, key: ObjectKey, seal: Seal | None = None) -> bytes:
    page = bytearray(HEADER_BYTES)
    digest = pages.salt_digest(space.salt)
    guard = pages.checksum(memoryview(b"x" * _LENGTH))
    header = Header(space.fingerprint, digest, key, _LENGTH, guard, 4, space.model, 1e9, seal)
    pages.encode(memoryview(page), header)
    return bytes(page)


def _sealed(data: bytes) -> bytes:
    """With the right checksum of itself, when it is a whole page."""
    if len(data) < HEADER_BYTES:
        return data
    return data[:_SEALED] + xxh3_128_digest(data[:_SEALED]) + data[HEADER_BYTES:]
