"""From the operator's text to stores: `fs:///var/lib/kvkeep?capacity=100GiB&name=disk`.

A URL's scheme names an entry point of the group `kvkeep.backends`: a factory that takes the parsed
URL and asks it for the options it knows. What nobody asked for is a typing error and refused. Here
alone the wrappers are put around a backend, always in the same order.
"""

import posixpath
import re
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvkeep.backends.base import ENTRY_POINTS, Backend, Buffered, Tenanted
from kvkeep.backends.checked import Store
from kvkeep.backends.encrypted import Sealer
from kvkeep.backends.guarded import Guarded, GuardSettings, Log
from kvkeep.backends.jobs import Offload
from kvkeep.backends.measured import Measured
from kvkeep.errors import ConfigError
from kvkeep.limits import parse_bytes

# Also works where the package's metadata is older than its code, as in a source tree.
BUILT_IN = {"fs": "kvkeep.backends.fs:from_url"}

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_BETWEEN = re.compile(r"[\s,]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_FLAGS = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(
    ("0", "off", "false", "no"), False
)


class BackendUrl:
    """One URL. A factory reads its options by the getters, which also note what is known."""

    def __init__(self, text: str) -> None:
        parts = _split(text)
        self.scheme = parts.scheme
        self.host = parts.hostname or ""
        self.port = parts.port
        self.user = unquote(parts.username or "")
        self.password = unquote(parts.password or "")
        self.path = unquote(parts.path)
        place = parts.netloc.rpartition("@")[2]
        public = parts._replace(netloc=place).geturl()  # for people: no user, no password
        self.public = public if place else public.replace(":", "://", 1)
        self.options = self._parsed(parts)
        self._asked: set[str] = set()
        self.name = self.text("name", self.scheme)
        if _NAME.fullmatch(self.name) is None:
            raise self.problem(
                f"{self.name!r} is not a name; use letters, digits, '_', '-' and '.', at most 64"
            )

    @property
    def place(self) -> object:
        """Equal for two URLs that mean the same place, as far as spelling shows it."""
        path = posixpath.normpath(f"/{self.path.strip('/')}")
        return self.scheme, self.host, self.port, self.user, path

    def text(self, option: str, default: str = "") -> str:
        """The option as it stands."""
        return self._read(option, default, str)

    def size(self, option: str, default: int | None = None) -> int | None:
        """Bytes, such as 100GiB."""
        return self._read(option, default, parse_bytes)

    def number(self, option: str, default: int, *, least: int = 0, most: int = 1 << 31) -> int:
        """A whole number within bounds."""

        def whole(text: str) -> int:
            if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
                raise ValueError(f"write a whole number from {least} to {most}")
            return int(text)

        return self._read(option, default, whole)

    def flag(self, option: str, default: bool) -> bool:
        """on or off."""
        return self.choice(option, _FLAGS, default)

    def choice(self, option: str, choices: dict[str, T], default: T) -> T:
        """One of the given words."""

        def chosen(text: str) -> T:
            if text.lower() not in choices:
                raise ValueError(f"write one of: {', '.join(choices)}")
            return choices[text.lower()]

        return self._read(option, default, chosen)

    def refuse_unknown(self) -> None:
        """Raise ConfigError for an option that nobody asked for."""
        for option in self.options:
            if option not in self._asked:
                known = ", ".join(sorted(self._asked))
                raise self.problem(f"{option} is not an option of {self.scheme}; known are {known}")

    def problem(self, text: str) -> ConfigError:
        """The error to raise: names this URL."""
        return ConfigError(f"L2 {self.public}: {text}")

    def _read(self, option: str, default: T, convert: Callable[[str], T]) -> T:
        self._asked.add(option)
        if option not in self.options:
            return default
        try:
            return convert(self.options[option])
        except ValueError as error:
            raise self.problem(f"{option}={self.options[option]}: {error}") from None

    def _parsed(self, parts: SplitResult) -> dict[str, str]:
        if parts.fragment:
            raise self.problem("a '#' ends the URL; write it as %23")
        options: dict[str, str] = {}
        for option, value in parse_qsl(parts.query, keep_blank_values=True):
            if option in options:
                raise self.problem(f"{option} is given twice; leave one of them out")
            options[option] = value
        return options


def stores(
    text: str,
    *,
    settings: GuardSettings,
    log: Log,
    offload: Offload | None = None,
    sealer: Callable[[], Sealer] | None = None,
) -> list[Store]:
    """One store for each URL, in order; the list is separated by spaces or commas.

    `sealer` makes what encrypts, one for each. Nothing is opened. Raises ConfigError, which names
    the URL and the fix.
    """
    backends = [backend(url) for url in parse(text)]
    return [
        compose(
            raw,
            settings=settings,
            log=log,
            offload=offload,
            sealer=None if sealer is None else sealer(),
        )
        for raw in backends
    ]


def parse(text: str) -> list[BackendUrl]:
    """The URLs of a list, each with a name of its own. Raises ConfigError."""
    parts = [part for part in _BETWEEN.split(text) if part]
    for part in parts[1:]:
        if not _SCHEME.match(part):
            raise ConfigError(
                f"L2 URL {_unsecret(part)} has no scheme; a space or a comma separates URLs: "
                "inside of one write %20 or %2C"
            )
    urls = [BackendUrl(part) for part in parts]
    names: set[str] = set()
    places: dict[object, BackendUrl] = {}
    for url in urls:
        other = places.setdefault(url.place, url)
        if other is not url:
            raise url.problem(f"it is the same place as {other.public}; leave one of them out")
        if url.name in names:
            raise url.problem(f"two have the name {url.name}; give one another, as in ?name=disk2")
        names.add(url.name)
    return urls


def backend(url: BackendUrl) -> Backend:
    """The bare backend of one URL, with no wrapper around it. Raises ConfigError."""
    factory = _factory(url)
    raw: Backend = factory(url)
    url.refuse_unknown()
    return raw


def compose(
    raw: Backend,
    *,
    settings: GuardSettings,
    log: Log,
    offload: Offload | None = None,
    sealer: Sealer | None = None,
    wall: Callable[[], float] = time.time,
) -> Store:
    """The backend with deadlines, breaker, counts and checks around it, ready for the server."""
    guard = Guarded(raw, settings=settings, log=log)
    store = Store(Measured(guard), guard=guard, sealer=sealer, offload=offload, wall=wall, log=log)
    store.tenanted = raw if isinstance(raw, Tenanted) else None
    store.backend_bytes = raw.buffer_bytes if isinstance(raw, Buffered) else 0
    return store


def _factory(url: BackendUrl) -> Callable[[BackendUrl], Any]:
    found = {name: EntryPoint(name, value, ENTRY_POINTS) for name, value in BUILT_IN.items()}
    found.update((entry.name, entry) for entry in entry_points(group=ENTRY_POINTS))
    if url.scheme not in found:
        known = ", ".join(sorted(found))
        raise url.problem(f"{url.scheme} is not a kind of L2; installed are {known}")
    entry = found[url.scheme]
    try:
        factory: Callable[[BackendUrl], Any] = entry.load()
    except (ImportError, AttributeError) as error:
        raise url.problem(
            f"{entry.value} cannot be loaded ({error}); install what it needs"
        ) from error
    return factory


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port  # read here, since it raises when it is no number
    except ValueError as error:
        raise ConfigError(f"L2 URL {_unsecret(text)}: {error}; correct it") from None
    if not parts.scheme:
        raise ConfigError(
            f"L2 URL {_unsecret(text)} has no scheme; write it as in fs:///var/lib/kvkeep"
        )
    if "://" not in text:
        rest = text[len(parts.scheme) + 1 :]
        better = f"{parts.scheme}://{rest}" if rest.startswith("/") else "fs:///var/lib/kvkeep"
        as_in = "" if rest.startswith("/") else "it as in "
        raise ConfigError(
            f"L2 URL {_unsecret(text)} lacks '//' after its scheme; "
            f"write {as_in}{_unsecret(better)}"
        )
    return parts


def _unsecret(text: str) -> str:
    """The text without what may be a user and a password."""
    return re.sub(r"(//|:)[^/?#]*@", r"\1", text)
