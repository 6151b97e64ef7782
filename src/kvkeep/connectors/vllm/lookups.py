"""The scheduler side's lookups: asked at arrival, read when the request is considered.

A lookup may be pending while the server fetches from L2; vLLM is then told to ask again next step.
No answer is waited for beyond the request's own limit and a grace, and a reservation that the
server took back before it was used is asked for again.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvkeep.client import Call, Client
from kvkeep.connectors.vllm.settings import Settings
from kvkeep.connectors.vllm.stats import L1, KVKeepStats
from kvkeep.connectors.vllm.tracked import Tracked
from kvkeep.core.keys import root_hash
from kvkeep.types import NO_LEASE, ChunkHash, EndOutcome, Fingerprint
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOOKUP_WAIT_S = 0.001  # in one call of get_num_new_matched_tokens
GRACE_S = 1.0  # past a lookup's limit: then its answer is not waited for
MOST_REVOKED = 3  # reservations of one request; then it computes
_MOST_REMEMBERED = 1024
_MOST_ROOTS = 4096


class Revocations:
    """Reservations that the server took back. The client tells it in any thread."""

    def __init__(self) -> None:
        self._leases: set[int] = set()

    def on_push(self, message: m.ServerMessage) -> None:
        """Remember what was taken back."""
        if isinstance(message, m.Revoked):
            if len(self._leases) > _MOST_REMEMBERED:
                self._leases.clear()  # a live one among them is a failed load, nothing worse
            self._leases.add(message.lease)

    def take(self, lease: int) -> bool:
        """Whether this reservation is lost; it is forgotten then."""
        if lease in self._leases:
            self._leases.discard(lease)
            return True
        return False


class Lookups:
    """One per engine; called by vLLM's scheduler thread only."""

    def __init__(
        self, settings: Settings, client: Client, world: int, revocations: Revocations
    ) -> None:
        self.stats = KVKeepStats()
        self._settings = settings
        self._client = client
        self._world = world
        self._chunk = settings.chunk_tokens
        self._may_idle = False  # the device had nothing to do, and nobody waited in this step yet
        self._revocations = revocations
        self._roots: dict[tuple[bytes, str | None], ChunkHash] = {}

    def begin_step(self, scheduled_tokens: int) -> None:
        """A step was built; with nothing in it, one call of the next may wait for L2."""
        self._may_idle = scheduled_tokens == 0

    # ---- one request

    def begin(self, tracked: Tracked) -> None:
        """Send the lookup at once, so that it overlaps the queue."""
        self._ask(tracked, near=False)

    def matched(self, tracked: Tracked, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that kvkeep will load; None: ask again next step."""
        tracked.local_tokens = local_tokens
        self._drop_revoked(tracked)
        if tracked.lookup is None and tracked.found is None:
            self._ask(tracked, near=True)
        if not self._answered(tracked):
            return None, False
        if tracked.found_epoch != self._client.epoch:
            tracked.found = None  # its server is gone, and the reservation with it
        found = tracked.found
        if found is not None and found.lease == NO_LEASE and found.chunks:
            tracked.found = None  # there was no room to reserve when it arrived; now it counts
            self._ask(tracked, near=True)
            if not self._answered(tracked):
                return None, False
            found = tracked.found
        if found is None:
            return 0, False
        beyond = found.chunks * self._chunk - local_tokens
        if beyond <= 0 or found.lease == NO_LEASE:
            self.release(tracked, EndOutcome.UNUSED)
            tracked.found = _nothing(found.seq)
            return 0, False
        return beyond, True

    def release(self, tracked: Tracked, outcome: EndOutcome) -> None:
        """End a reservation that no worker has seen."""
        found, tracked.found = tracked.found, None
        if found is not None and found.lease != NO_LEASE:
            self._client.notify(
                m.End(
                    found.lease,
                    tuple(range(self._world)),
                    outcome,
                    request=tracked.id,
                    device_tokens=tracked.local_tokens,
                )
            )

    def forget(self, tracked: Tracked) -> None:
        """What was asked or found for it counts no more; it may be asked again."""
        if tracked.lookup is not None:
            self._client.abandon(tracked.lookup)
            tracked.lookup = None
        self.release(tracked, EndOutcome.UNUSED)

    # ---- keys and tiers

    def root(self, salt: str | None) -> ChunkHash | None:
        """The root of this engine's keys under a salt; None until every rank is there."""
        ready = self._client.ready
        if ready is None:
            return None
        key = (ready.fingerprint, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) > _MOST_ROOTS:
                self._roots.clear()
            root = self._roots[key] = root_hash(Fingerprint(ready.fingerprint), salt)
        return root

    def tiers(self, found: m.Found) -> list[str]:
        """Where each chunk of a hit came from: `l1`, or `l2:` and the backend's name."""
        welcome = self._client.welcome
        names = welcome.backends if welcome is not None else ()
        known = [L1, *(f"l2:{name}" for name in names)]
        numbers: Iterable[int] = found.tiers or bytes(found.chunks)
        return [known[n] if n < len(known) else f"l2:{n}" for n in numbers]

    # ---- inside

    def _ask(self, tracked: Tracked, *, near: bool) -> None:
        request: Request = tracked.request
        root = self.root(request.cache_salt)
        chunks = (request.num_tokens - 1) // self._chunk
        skip = getattr(request, "skip_reading_prefix_cache", False) or tracked.params.no_lookup
        if root is None or chunks == 0 or skip or not self._settings.reads:
            return
        hashes = b"".join(tracked.chain(root, chunks, self._chunk))
        wait_ms = _wait_ms(tracked)
        tracked.lookup = self._client.call(
            lambda seq: m.Lookup(
                seq,
                tracked.id,
                hashes,
                request.cache_salt,
                near,
                request.num_prompt_tokens,
                fetch=wait_ms != 0,
                wait_ms=wait_ms,
            )
        )
        tracked.asked = tracked.asked or tracked.lookup is not None

    def _answered(self, tracked: Tracked) -> bool:
        """False while the answer may still come. Takes it when it is there."""
        call = tracked.lookup
        if call is None:
            return True
        if not call.done and not call.abandoned:
            self._wait(call)
        if not call.done and not call.abandoned:
            if not self._hopeless(call):
                return False
            self._client.abandon(call)
            tracked.gave_up = True
            self._ask(tracked, near=True)  # for what is in L1; nothing when the server is away
            return self._answered(tracked)
        tracked.lookup = None
        if isinstance(call.reply, m.Found) and not call.abandoned:
            tracked.found, tracked.found_epoch = call.reply, call.epoch
            self.stats.count("lookups")
            self._drop_revoked(tracked)
        return True

    def _wait(self, call: Call) -> None:
        """Within the step's budget; for L2 only while the engine has nothing else to do."""
        self._client.pump()
        if call.ticket:
            if not self._may_idle:
                return
            self._may_idle = False  # the next request's wait would add to this one
        if not call.done:
            self._client.wait(call, LOOKUP_WAIT_S)

    def _hopeless(self, call: Call) -> bool:
        """A pending answer of a server that is away, or one far past its limit."""
        if not call.ticket:
            return False  # the client's patience judges these
        assert isinstance(call.message, m.Lookup)
        wait_ms = call.message.wait_ms
        welcome = self._client.welcome
        if wait_ms < 0 and welcome is not None:
            wait_ms = welcome.lookup_wait_ms
        limit_s = wait_ms / 1e3
        return not self._client.up or time.monotonic() - call.sent_s > limit_s + GRACE_S

    def _drop_revoked(self, tracked: Tracked) -> None:
        found = tracked.found
        if found is None or not self._revocations.take(found.lease):
            return
        tracked.revoked += 1
        tracked.found = _nothing(found.seq) if tracked.revoked > MOST_REVOKED else None


def _wait_ms(tracked: Tracked) -> float:
    """How long the server may fetch for it: 0 not at all, negative as long as it is set to."""
    deadline_ms = tracked.params.deadline_ms
    if tracked.gave_up:
        return 0.0
    if deadline_ms is None:
        return -1.0
    return max(0.0, deadline_ms - (time.monotonic() - tracked.arrived_s) * 1e3)


def _nothing(seq: int) -> m.Found:
    """Answered: nothing to load."""
    return m.Found(seq, NO_LEASE, 0, (), b"")
