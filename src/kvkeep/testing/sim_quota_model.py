"""What must be true of quotas, computed another way than the core computes it.

Adds up every tenant's bytes from what is resident, staged and on its way. Nobody above its limit
gets more, and time alone takes only from those who are above.
"""

from collections import Counter

from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.core.quota import EVERYTHING, in_bytes
from kvkeep.types import Amount

Used = Counter[str | None]


class QuotaModel:
    """The limits of one epoch, as its events set them."""

    def __init__(self, directory: Directory) -> None:
        self._d = directory
        self._own: dict[str | None, Amount] = {}

    def used(self) -> Used:
        """Bytes by tenant."""
        d, used = self._d, Used()
        for chunk in (*d.residents.index.values(), *d.residents.unlinked):
            used[chunk.space.salt] += chunk.size_bytes
        for session in d.sessions.values():
            for lease in session.writes_open.values():
                used[lease.space.salt] += session.chunk_bytes
        for fetch in d.fetcher.flights.fetches.values():
            used[fetch.space.salt] += fetch.size_bytes
        return used

    def after(self, event: ev.Event, before: Used) -> None:
        """Compare what everybody has with what he had and may have."""
        if isinstance(event, ev.SetQuota):
            if event.amount is None:
                self._own.pop(event.salt, None)
            else:
                self._own[event.salt] = event.amount
        used = self.used()
        for salt in {*before, *used}:
            assert used[salt] == self._d.quotas.used_bytes(salt), "what a tenant has"
            amount = self._own.get(salt, self._d.limits.default_quota)
            if amount == EVERYTHING:
                continue
            most_bytes = in_bytes(amount, self._d.arena.populated_bytes)
            assert used[salt] <= max(most_bytes, before[salt]), "more than its limit"
            if isinstance(event, ev.Tick) and before[salt] <= most_bytes:
                assert used[salt] == before[salt], "a tenant below its limit shrank"
