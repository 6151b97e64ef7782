"""The contract of an L2 backend: what a plug-in implements, and nothing about KV.

A backend keeps named pairs of a header page and a payload. It never interprets them: `checked.py`
writes and verifies headers, `guarded.py` adds deadlines and the breaker, `measured.py` counts.
Methods run on the event loop and must not block it: slow work goes to the backend's own threads or
processes. Plug-ins register under the entry point group `kvkeep.backends`, by URL scheme.
"""

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvkeep.types import IoOutcome, Namespace, ObjectKey

PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
ABSENT = -1
ENTRY_POINTS = "kvkeep.backends"


@dataclass(frozen=True, slots=True)
class Item:
    """One object on its way, with the memory it goes to or comes from.

    `header` is one page. `payload` starts at a page and has whole pages; `length` is the object's
    exact size, and nobody may rely on the bytes of `payload` beyond it. `depth` counts the chunks
    before this one in its prompt: a deeper object is worth less.
    """

    space: Namespace
    key: ObjectKey
    header: memoryview
    payload: memoryview
    length: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a backend holds. Exact for what this process may change; None where nobody knows."""

    objects: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted_objects: int = 0
    quarantined_objects: int = 0
    scanned: float = 1.0  # share of the index that is rebuilt; 1.0: complete
    read_only: bool = False  # it refuses every put
    last_error: str = ""  # of work that nobody waited for, such as an eviction


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one salt has in a backend; `digest` as in the namespace's label, empty without a salt.

    The counts are since the start; a backend may put those of many tenants together.
    """

    digest: str
    used_bytes: int
    refused_objects: int = 0
    evicted_objects: int = 0  # for the tenant's own limit


class TenantLimits(Protocol):
    """How much each salt may take. Limits change while a backend is open."""

    def limit_bytes(self, digest: str, capacity_bytes: int) -> int | None:
        """Of a backend of that capacity; None: as much as there is."""


@runtime_checkable
class Tenanted(Protocol):
    """What a backend has too when it keeps each salt within a limit of its own. Optional.

    Above its limit a tenant's own least valuable objects go first; where that is not enough its
    puts are FULL. Nobody else's objects go for it.
    """

    def limit_tenants(self, limits: TenantLimits) -> None:
        """The limits to keep; before `open`."""

    def tenants(self) -> Sequence[TenantUsage]:
        """Every salt that has something here or was refused."""

    def refused_puts(self) -> Mapping[str, int]:
        """By digest, what was FULL for a salt's own limit; of at most a thousand salts or so."""


@runtime_checkable
class Buffered(Protocol):
    """What a backend says too when it takes much memory of its own. Optional."""

    buffer_bytes: int  # at most, beside the arena; known before `open`


class Backend(Protocol):
    """One kind of L2. Raises OSError or BackendError when something fails; that is an answer."""

    name: str  # as the operator named it; the scheme unless the URL says `name=`
    url: str  # for people: without secrets

    async def open(self) -> None:
        """Take the place into use. Raises BackendError, naming the thing and the fix."""

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """Which objects are there: at once from memory, or later."""

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        """Read header and payload into the items' memory.

        Returns each object's stored payload size, or ABSENT. An object of another size than
        `length` is reported with its own size (0 where not even a header page is there); then only
        its header page need have been read. Memory is not touched after the return or a raise.
        """

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        """Store; an object is found only when all of it is there. OK, FULL or REFUSED for each.

        What is there under the same key is replaced. Memory is not touched after the return.
        """

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Nobody finds these any more. `broken` ones may be kept aside for a person to look at."""

    async def forget(self, space: Namespace) -> None:
        """Nobody finds anything of this fingerprint any more, whatever its salt."""

    def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """Every object: (namespace label, key, payload bytes). For a scrub, not for a lookup."""

    async def probe(self) -> None:
        """Do something small that shows that reading and writing work; raises when they do not."""

    def usage(self) -> Usage:
        """What it holds now; immediate."""

    async def close(self) -> None:
        """End. I/O that hangs is left behind; the memory of abandoned I/O stays valid."""
