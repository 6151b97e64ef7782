"""Decides how much of L1 each tenant may take. A tenant is a salt; None, no salt, is one too.

What a tenant has is what is resident and what is staged under its salt, engines' and fetches'
alike. At its limit its own coldest chunks go, never another's; where they may not go, it is refused
and that is counted. Who was given less than it has shrinks with every store and every tick, a few
chunks at a time. Memory that a lost owner may still write counts for nobody.
"""

from collections import Counter
from collections.abc import Callable, Container
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.types import Amount, ChunkHash

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

MOST_AT_ONCE = 64  # chunks of one tenant evicted in one store or tick
_TRIES = 4  # of a tick: each may take the policy a millisecond
MOST_COUNTED = 1_000  # tenants with counts of their own
OTHERS = "\0others"  # and all the rest

EVERYTHING = Fraction(1)


def in_bytes(amount: Amount, capacity_bytes: int) -> int:
    """The amount of something that large."""
    return int(amount * capacity_bytes) if isinstance(amount, Fraction) else amount


class Quotas:
    """What every tenant may have in L1, and what it has staged."""

    def __init__(self, directory: "Directory", default: Amount) -> None:
        self._d = directory
        self.default = default
        self.own: dict[str | None, Amount] = {}
        self.staged_bytes: Counter[str | None] = Counter()
        self.refused: Counter[str | None] = Counter()  # chunks
        self.evicted: Counter[str | None] = Counter()  # chunks, for the tenant's own limit
        self._shrinking: dict[str | None, None] = {}  # in turn, not in an order of hashes
        self._chunk_bytes = 0  # of the smallest chunk so far
        self._announced: dict[str | None, None] = {}  # to the policy; in turn

    def amount(self, salt: str | None) -> Amount:
        """The tenant's limit as it was given."""
        return self.own.get(salt, self.default)

    def limit_bytes(self, salt: str | None) -> int:
        """What the tenant may have now: a share grows with the populated memory."""
        return in_bytes(self.amount(salt), self._d.arena.populated_bytes)

    def used_bytes(self, salt: str | None) -> int:
        """What it has, resident and staged."""
        return self._d.residents.usage_bytes.get(salt, 0) + self.staged_bytes[salt]

    def tenants(self) -> set[str | None]:
        """Everyone who has something, was refused, or has a limit of its own."""
        usage = self._d.residents.usage_bytes
        return {*usage, *self.staged_bytes, *self.own, *self.refused, *self.evicted}

    def set(self, event: ev.SetQuota) -> ev.Done:
        """A tenant has a limit of its own from now on, or again the default."""
        before = self.amount(event.salt)
        if event.amount is None:
            self.own.pop(event.salt, None)
        else:
            self.own[event.salt] = event.amount
        if self._is_limited(event.salt):
            self._announce(event.salt)
            self._shrinking[event.salt] = None
        return ev.Done(self.amount(event.salt) != before)

    def admits(
        self,
        salt: str | None,
        size_bytes: int,
        protect: Callable[[], Container[ChunkHash]] = tuple,
    ) -> bool:
        """Whether so much more may be staged. Evicts the tenant's coldest for it, not `protect`."""
        if not self._is_limited(salt):
            return True
        self._announce(salt)
        most_bytes = self.limit_bytes(salt)
        over_bytes = self.used_bytes(salt) + size_bytes - most_bytes
        if over_bytes <= 0:
            return True
        need_bytes = min(over_bytes, MOST_AT_ONCE * size_bytes)
        return size_bytes <= most_bytes and self._evict(salt, need_bytes, protect())

    def refuse(self, salt: str | None) -> None:
        """One chunk of the tenant found no room under its limit."""
        _count(self.refused, salt)

    def staged(self, salt: str | None, size_bytes: int) -> None:
        """So much is staged under the salt; negative: is not any more."""
        if size_bytes > 0:
            self._chunk_bytes = min(self._chunk_bytes or size_bytes, size_bytes)
        self.staged_bytes[salt] += size_bytes
        if not self.staged_bytes[salt]:
            del self.staged_bytes[salt]

    def tick(self) -> None:
        """Tenants above a limit that was lowered give some back; what is read goes later."""
        tries = _TRIES
        for salt in list(islice(self._shrinking, _TRIES)):
            over_bytes = self.used_bytes(salt) - self.limit_bytes(salt)
            need_bytes = min(over_bytes, MOST_AT_ONCE * self._chunk_bytes)
            while tries and need_bytes > 0:
                tries -= 1
                is_done = self._evict(salt, need_bytes, ())
                # So much may not go now; perhaps a part of it may.
                is_least = need_bytes <= self._chunk_bytes
                need_bytes = 0 if is_done or is_least else need_bytes // 4
            del self._shrinking[salt]
            if self.used_bytes(salt) > self.limit_bytes(salt):
                self._shrinking[salt] = None  # again when it is its turn
        for salt in list(islice(self._announced, MOST_AT_ONCE)):
            del self._announced[salt]
            if self._is_limited(salt) and self.used_bytes(salt):
                self._announced[salt] = None  # looked at again when it is its turn
            else:
                self._d.residents.policy.unlimit(salt)

    def _announce(self, salt: str | None) -> None:
        """The policy keeps apart what it has of a tenant, as long as that has anything."""
        self._announced[salt] = None
        self._d.residents.policy.limit(salt)

    def _is_limited(self, salt: str | None) -> bool:
        """Whether the tenant may have less than everything."""
        return self.own.get(salt, self.default) != EVERYTHING

    def _evict(self, salt: str | None, need_bytes: int, protect: Container[ChunkHash]) -> bool:
        residents = self._d.residents
        before = residents.evicted_chunks
        is_done = residents.evict_of(salt, need_bytes, protect)
        if gone := residents.evicted_chunks - before:
            _count(self.evicted, salt, gone)
        return is_done


def _count(counts: Counter[str | None], salt: str | None, more: int = 1) -> None:
    known = salt in counts or len(counts) < MOST_COUNTED
    counts[salt if known else OTHERS] += more
