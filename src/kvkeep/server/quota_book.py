"""Keeps what each tenant may take: the defaults, and the limits of its own in the quota file.

The file is TOML, a table per salt; the empty name stands for requests without a salt:

    ["tenant-a"]
    l1 = "10%"
    l2 = "50GiB"

It is read once, at start, and written anew, whole or not at all, when an operator sets a limit.
Others may read it and not write it. Backends know a salt by its digest only, so both names lead to
a limit here.
"""

import json
import os
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.backends.header import SALT_DIGITS, salt_digest
from kvkeep.config import QuotaConfig
from kvkeep.core import events as ev
from kvkeep.core.quota import EVERYTHING, in_bytes
from kvkeep.errors import ConfigError
from kvkeep.limits import parse_amount
from kvkeep.types import Amount, printable

MOST_TENANTS = 10_000  # with a limit of their own
MOST_NAME_CHARS = 1_024
TIERS = ("l1", "l2")
_MODE = 0o600
_OTHERS_WRITE = 0o022
_HEAD = '# Limits of tenants, written by kvkeep quota. A table per salt; [""] is without a salt.\n'

Salt = str | None


@dataclass(frozen=True, slots=True)
class Limits:
    """One tenant's limits as somebody wrote them; None: the default."""

    l1: str | None = None
    l2: str | None = None


class QuotaBook:
    """Everybody's limits. A backend asks `limit_bytes`, with the digest of a salt."""

    def __init__(self, config: QuotaConfig | None = None) -> None:
        """Raises ConfigError when the file cannot be read or is wrong."""
        config = config or QuotaConfig()
        self.defaults = Limits(config.default_l1, config.default_l2)
        self.path = Path(config.file) if config.file else None
        self._default_l2 = parse_amount(config.default_l2)
        self._own: dict[Salt, Limits] = {}
        self._l2: dict[str, Amount] = {}  # by digest
        self._salts: dict[str, Salt] = {}  # of those with a limit of their own, by digest
        if self.path is not None:
            for salt, limits in _read(self.path).items():
                self.enter(salt, limits)

    @property
    def default_l1(self) -> Amount:
        """What the core gives a tenant that is not in the book."""
        return parse_amount(self.defaults.l1 or "")

    @property
    def own(self) -> Mapping[Salt, Limits]:
        """Tenants with a limit of their own."""
        return self._own

    def limit_bytes(self, digest: str, capacity_bytes: int) -> int | None:
        """See `backends.base.TenantLimits`."""
        amount = self._l2.get(digest, self._default_l2)
        return None if amount == EVERYTHING else in_bytes(amount, capacity_bytes)

    def salt_of(self, digest: str) -> Salt:
        """The name of a tenant that has a limit of its own; KeyError for others."""
        return self._salts[digest]

    def enter(self, salt: Salt, limits: Limits | None) -> ev.SetQuota:
        """A tenant's limits from now on; None: none of its own. The core is to be told so."""
        digest = digest_of(salt)
        self._l2.pop(digest, None)
        if limits is None:
            self._own.pop(salt, None)
            self._salts.pop(digest, None)
            return ev.SetQuota(salt, None)
        self._own[salt], self._salts[digest] = limits, salt
        if limits.l2 is not None:
            self._l2[digest] = parse_amount(limits.l2)
        return ev.SetQuota(salt, None if limits.l1 is None else parse_amount(limits.l1))

    def events(self) -> Iterator[ev.SetQuota]:
        """What the core is to be told at its start."""
        for salt, limits in list(self._own.items()):
            yield self.enter(salt, limits)

    def text_with(self, salt: Salt, limits: Limits | None) -> str:
        """The file as it is to be when this tenant has these limits."""
        own = {**self._own, salt: limits}
        tables = [_table(name, each) for name, each in own.items() if each is not None]
        return _HEAD + "".join(sorted(tables))


def digest_of(salt: Salt) -> str:
    """As in the label of an L2 namespace; empty without a salt."""
    digest = salt_digest(salt)
    return "" if digest is None else digest.hex()[:SALT_DIGITS]


def named(name: str) -> Salt:
    """The salt of a name in the file or on the command line."""
    return name or None


def problem(tier: str, text: object) -> str:
    """What is wrong with a limit; empty when nothing is."""
    if type(text) is not str:
        return f"{tier} must be a text such as '10%' or '50GiB'"
    try:
        parse_amount(text)
    except ValueError as error:
        return f"{tier} = {printable(text)[:64]!r}: {error}"
    return ""


def name_problem(name: str) -> str:
    """What is wrong with a tenant's name; empty when nothing is."""
    if len(name) <= MOST_NAME_CHARS:
        return ""
    return f"a salt of {len(name)} characters is too long: at most {MOST_NAME_CHARS}"


def write(path: Path, text: str) -> None:
    """Replace the file, whole or not at all, and have it on the disk. Blocks; raises OSError."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _table(name: Salt, limits: Limits) -> str:
    rows = [f'{tier} = "{text}"\n' for tier in TIERS if (text := getattr(limits, tier)) is not None]
    # JSON's escapes are TOML's; DEL is the one character that only TOML wants escaped.
    quoted = json.dumps(name or "", ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"\n[{quoted}]\n{''.join(rows)}"


def _read(path: Path) -> dict[Salt, Limits]:
    where = f"the quota file {path}"
    try:
        data = _bytes_of(where, path)
        if data is None:
            return {}  # the first `kvkeep quota set` makes it
        tables = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read ({error.strerror}): name another in quota.file, or none"
        ) from None
    except ValueError as error:  # broken TOML, or bytes that are no UTF-8
        raise ConfigError(f"{where} is not valid TOML ({error}): correct that place") from None
    if len(tables) > MOST_TENANTS:
        raise ConfigError(f"{where} has {len(tables)} tenants, at most {MOST_TENANTS} are allowed")
    return {named(name): _limits(where, name, table) for name, table in tables.items()}


def _bytes_of(where: str, path: Path) -> bytes | None:
    """The file, which nobody else may write; None where there may be one later. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.parent.is_dir():
            return None
        raise ConfigError(
            f"{where} is to be in a directory that does not exist: mkdir -p {path.parent}"
        ) from None
    try:
        _refuse_unsafe(where, path, os.fstat(fd))
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def _refuse_unsafe(where: str, path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{where} is not a regular file: name another in quota.file, or none")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{where} belongs to another user (uid {found.st_uid}), who may change it: "
            f"chown {os.geteuid()} {path}"
        )
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{where} has mode {mode:04o}, so others may change it: chmod go-w {path}"
        )


def _limits(where: str, name: str, table: object) -> Limits:
    shown = printable(name)[:64]
    if not isinstance(table, dict):
        raise ConfigError(
            f'{where}: {shown} is a value; write ["{shown}"] on a line of its own, '
            'and l1 = "10%" or l2 = "50GiB" below it'
        )
    for key in table:
        if key not in TIERS:
            raise ConfigError(f'{where}: {printable(key)[:64]!r} of "{shown}" is not l1 or l2')
    limits = {tier: str(v) if type(v) is int else v for tier, v in table.items()}  # plain bytes
    why = name_problem(name) or next(filter(None, map(problem, limits, limits.values())), "")
    if why:
        raise ConfigError(f'{where}: "{shown}": {why}')
    return Limits(**limits)
