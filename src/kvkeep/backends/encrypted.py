"""AES-256-GCM for objects in L2: what is sealed, under which key, and the memory that this takes.

Resident bytes in the arena never change: an object is encrypted into memory of a bounded pool and
written from there. When reading it is decrypted where it was read to, in the staged extent that
nobody reads before it has verified. The tag stands in the header page, so an object has the same
size as without encryption. It vouches for the payload and the whole page: key, fingerprint, salt
digest, length and whatever else the page says. A nonce is 12 random bytes per object: change the
active key before it has sealed 2**32 of them (2**32 is where the chance of two equal nonces is one
in 2**33). `cryptography` is imported only here, and only where a key file is configured; its calls
let other threads run.
"""

import asyncio
import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvkeep.backends import header as pages
from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.header import CHECKSUM_BYTES, NONCE_BYTES, Header, HeaderProblem, Seal
from kvkeep.backends.keyring import Key, Keyring, load_keys
from kvkeep.errors import ConfigError

BUFFER_BYTES = 256 << 20  # of each backend
_AT_ONCE_BYTES = 1 << 28  # the library counts bytes of one call in 31 bits
_ZEROS = bytes(1 << 20)

Random = Callable[[int], bytes]


class _Ciphers(NamedTuple):
    """What is used of the library."""

    cipher: Any
    aes: Any
    gcm: Any
    wrong_tag: type[Exception]


class Sealer:
    """Seals and opens the objects of one store. `random` gives nonces."""

    def __init__(
        self, keyring: Keyring, *, buffer_bytes: int = BUFFER_BYTES, random: Random = os.urandom
    ) -> None:
        """Raises ConfigError when the library is not installed."""
        self._lib = _library()
        self._random = random
        self._keyring = keyring
        self.pool = BouncePool(buffer_bytes)

    @property
    def active(self) -> str:
        """The name of the key that seals."""
        return self._keyring.active.id

    @property
    def keys(self) -> int:
        """How many keys there are to open with."""
        return len(self._keyring.keys)

    def seal(
        self, page: memoryview, header: Header, payload: memoryview, target: memoryview
    ) -> None:
        """Fill the page and put the encrypted payload into `target`. Runs in any thread."""
        key = self._keyring.active
        seal = Seal(self._random(NONCE_BYTES), key.check, key.id)
        header = replace(header, seal=seal, checksum=bytes(CHECKSUM_BYTES))
        pages.encode(page, header)
        cipher = self._lib.cipher(self._lib.aes(key.secret), self._lib.gcm(seal.nonce))
        work = cipher.encryptor()
        work.authenticate_additional_data(pages.associated(page))
        _through(work, payload, target)
        work.finalize()
        pages.encode(page, replace(header, checksum=work.tag))

    def problem(self, header: Header) -> HeaderProblem | None:
        """Why an object with a sound header cannot be opened here at all."""
        if header.seal is None:
            return HeaderProblem.NOT_ENCRYPTED
        return HeaderProblem.NO_KEY if self._key_of(header) is None else None

    def opens(self, header: Header, associated: bytes, payload: memoryview) -> bool:
        """Decrypt in place; False when this is not what was sealed: then it holds zeros."""
        key = self._key_of(header)
        if key is None or header.seal is None:
            return False
        gcm = self._lib.gcm(header.seal.nonce, header.checksum)
        work = self._lib.cipher(self._lib.aes(key.secret), gcm).decryptor()
        work.authenticate_additional_data(associated)
        _through(work, payload, payload)
        try:
            work.finalize()
        except self._lib.wrong_tag:
            for start in range(0, len(payload), len(_ZEROS)):  # not even by accident
                part = payload[start : start + len(_ZEROS)]
                part[:] = _ZEROS[: len(part)]
            return False
        return True

    def _key_of(self, header: Header) -> Key | None:
        return None if header.seal is None else self._keyring.find(header.seal.key_check)


class BouncePool:
    """Page-aligned memory for encrypted objects, never more than a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.mapped_bytes = 0
        self._free: deque[memoryview] = deque()  # oldest first
        self._waiting: list[asyncio.Future[None]] = []

    def batches(self, lengths: Sequence[int]) -> Iterator[range]:
        """Runs of objects that fit at once, in order; each alone must fit."""
        start, size_bytes = 0, 0
        for number, length in enumerate(lengths):
            if size_bytes and size_bytes + _whole_pages(length) > self.limit_bytes:
                yield range(start, number)
                start, size_bytes = number, 0
            size_bytes += _whole_pages(length)
        if lengths:
            yield range(start, len(lengths))

    def fits(self, length: int) -> bool:
        """Whether there can ever be memory for an object of this length."""
        return _whole_pages(length) <= self.limit_bytes

    async def take(self, lengths: Sequence[int], wait_s: float) -> list[memoryview] | None:
        """Whole pages for each, all or nothing; None when there are none within `wait_s`."""
        sizes = [_whole_pages(length) for length in lengths]
        assert sum(sizes) <= self.limit_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._has_room(sizes):
                    freed = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    await freed
                return [self._one(size) for size in sizes]
        return None

    def give_back(self, buffers: Iterable[memoryview]) -> None:
        """Nobody touches these any more. On the loop only."""
        self._free.extend(buffers)
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)

    def _has_room(self, sizes: Sequence[int]) -> bool:
        """Whether all of it could be taken, counting what is free as gone."""
        return self.mapped_bytes - sum(map(len, self._free)) + sum(sizes) <= self.limit_bytes

    def _one(self, size_bytes: int) -> memoryview:
        for buffer in self._free:
            if len(buffer) == size_bytes:
                self._free.remove(buffer)
                return buffer
        while self._free and self.mapped_bytes + size_bytes > self.limit_bytes:
            self.mapped_bytes -= len(self._free.popleft())
        self.mapped_bytes += size_bytes
        return memoryview(mmap.mmap(-1, size_bytes))


def sealers(
    key_file: str, buffer_bytes: int, setting: str = "l2.key_file"
) -> Callable[[], Sealer] | None:
    """Makes a sealer for each store; None without a key file. Raises ConfigError at once.

    `setting`: what messages call the key file.
    """
    if not key_file:
        return None
    keyring = load_keys(key_file, setting)
    _library(setting)
    return lambda: Sealer(keyring, buffer_bytes=buffer_bytes)


def _library(setting: str = "l2.key_file") -> _Ciphers:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs the package cryptography ({error}): "
            f"pip install 'kvkeep[encryption]', or leave {setting} empty"
        ) from error
    return _Ciphers(Cipher, AES, GCM, InvalidTag)


def _through(work: Any, source: memoryview, target: memoryview) -> None:  # noqa: ANN401 - foreign
    for start in range(0, len(source), _AT_ONCE_BYTES):
        part = source[start : start + _AT_ONCE_BYTES]
        work.update_into(part, target[start : start + len(part)])


def _whole_pages(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES
