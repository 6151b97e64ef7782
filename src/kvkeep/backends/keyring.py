"""The keys of encrypted L2: a private file of named keys. The first one seals, all of them open.

    # name, then 32 random bytes in base64
    2026-11 Dq0lk2...=

A key is known by a digest of itself, not by its name: another key under an old name opens nothing
and breaks nothing. A file that others may read or change is refused, and so is a broken line: what
a server cannot read must not look like an empty disk. Whoever adds a key holds a lock on the file's
directory, so that of two at once none is lost. No message ever shows a key.
"""

import base64
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from kvkeep.backends.header import KEY_CHECK_BYTES, KEY_ID_BYTES
from kvkeep.errors import ConfigError

SECRET_BYTES = 32
MOST_KEYS = 64
LOCK_WAIT_S = 10.0
_LOCK_AGAIN_S = 0.02
_MOST_FILE_BYTES = 1 << 16
_CHECK_DOMAIN = "kvkeep 2026 L2 key check"
_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{KEY_ID_BYTES - 1}}}")
_HEAD = "# Keys of kvkeep's L2: the first one encrypts, all of them decrypt. Keep a copy.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """One AES-256 key; its secret is in no text of it."""

    id: str
    secret: bytes = field(repr=False)

    @property
    def check(self) -> bytes:
        """Tells this key from every other one, and nothing about it."""
        digest = blake3(self.secret, derive_key_context=_CHECK_DOMAIN)
        return digest.digest(KEY_CHECK_BYTES)


class Keyring:
    """Keys in order; there is at least one."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        assert self.keys
        self._known = {key.check: key for key in self.keys}

    @property
    def active(self) -> Key:
        """The one that seals."""
        return self.keys[0]

    def find(self, check: bytes) -> Key | None:
        """The key that an object names."""
        return self._known.get(check)


def load_keys(path: str, setting: str = "l2.key_file") -> Keyring:
    """The keys of a file. Raises ConfigError, naming the file and the fix."""
    keys = _parsed(path, read_private(path, setting))
    if not keys:
        raise ConfigError(f"{path} has no key: make one with kvkeep l2-key new {path}")
    return Keyring(keys)


def new_key(path: str, key_id: str = "") -> Keyring:
    """Make a key the active one of a file, which is made if it is not there. Raises ConfigError."""
    if not path:
        raise ConfigError("no key file is named: name a file in a directory of this user")
    path = os.path.realpath(path)
    with _alone_in(os.path.dirname(path), path):
        return _added(path, key_id)


def _added(path: str, key_id: str) -> Keyring:
    known: Sequence[Key] = ()
    text = _HEAD
    owner: os.stat_result | None = None
    if os.path.lexists(path):
        data = read_private(path, "the key file")
        known, text = _parsed(path, data), data.decode("utf-8", "replace") or _HEAD
        owner = os.stat(path)
    key = Key(key_id or _unused_id(known), secrets.token_bytes(SECRET_BYTES))
    if _ID.fullmatch(key.id) is None:
        raise ConfigError(
            f"{key.id!r} is no name of a key: write letters, digits, '_', '-' and '.', "
            f"at most {KEY_ID_BYTES}"
        )
    if any(key.id == other.id for other in known):
        raise ConfigError(f"{path} has a key {key.id} already: choose another name")
    if len(known) >= MOST_KEYS:
        raise ConfigError(f"{path} has {MOST_KEYS} keys, and no more are read: remove old ones")
    lines = text.splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines) if _is_key(line)), len(lines))
    lines.insert(first, _line(key))
    _write(Path(path), "".join(lines), owner)
    return Keyring([key, *known])


def read_private(path: str, setting: str) -> bytes:
    """All of a file that nobody else may read or change. Raises ConfigError with the fix."""
    what = f"{setting} = {path}" if "." in setting else f"{setting} {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be read ({error.strerror}): name a file of this user"
        ) from None
    try:
        _refuse_shared(what, path, os.fstat(fd))
        data = os.read(fd, _MOST_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_FILE_BYTES:
        raise ConfigError(f"{what} is larger than {_MOST_FILE_BYTES} bytes: name the right file")
    return data


def _refuse_shared(what: str, path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{what} is not a regular file: name one")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{what} belongs to another user (uid {found.st_uid}), who may change it: "
            f"chown {os.geteuid()} {path}"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{what} has mode {mode:04o}, so others may use it: chmod 600 {path}")


def _parsed(path: str, data: bytes) -> list[Key]:
    keys: list[Key] = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        if not _is_key(line):
            continue
        words = line.split()
        problem = _problem(words, keys)
        if problem:
            raise ConfigError(
                f"{path}, line {number}: {problem}; write a name and 32 bytes in base64, "
                f"as kvkeep l2-key new {path} does"
            )
        keys.append(Key(words[0], base64.b64decode(words[1], validate=True)))
    return keys


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _problem(words: Sequence[str], keys: Sequence[Key]) -> str:
    """What is wrong with one line, without showing it: its words may be secrets."""
    if len(words) != 2:
        return f"{len(words)} words instead of 2"
    if _ID.fullmatch(words[0]) is None:
        return "the first word is no name of a key"
    try:
        secret = base64.b64decode(words[1], validate=True)
    except ValueError:  # of binascii too
        return "the second word is no base64"
    if len(secret) != SECRET_BYTES:
        return f"the key has {len(secret)} bytes"
    if any(words[0] == key.id for key in keys):
        return "a key of this name comes before"
    if any(secret == key.secret for key in keys):
        return "the same key comes before under another name"
    return f"more than {MOST_KEYS} keys" if len(keys) >= MOST_KEYS else ""


def _unused_id(keys: Sequence[Key]) -> str:
    taken = {key.id for key in keys}
    return next(name for name in iter(lambda: f"k-{secrets.token_hex(4)}", "") if name not in taken)


@contextmanager
def _alone_in(directory: str, path: str) -> Iterator[None]:
    """Nobody else changes a key file of the directory. A file is replaced, so it is no lock."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _not_written(path, error) from None
    try:
        _lock(fd, directory, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, directory: str, path: str) -> None:
    until_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"{directory} is locked by another process, as an L2 in use is: "
                    "keep the key file in a directory of its own"
                ) from None
            time.sleep(_LOCK_AGAIN_S)
        except OSError as error:
            raise _not_written(path, error) from None
        else:
            return


def _not_written(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written ({error.strerror}): name a file in a directory of this user"
    )


def _line(key: Key) -> str:
    return f"{key.id} {base64.b64encode(key.secret).decode()}\n"


def _write(path: Path, text: str, owner: os.stat_result | None) -> None:
    """Replace the file, whole or not at all; it keeps its owner."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "w") as file:
                os.fchmod(fd, 0o600)
                if owner is not None and owner.st_uid != os.geteuid():
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _not_written(path, error) from None
