"""What a lookup that waits for L2 is: its positions, what each of them has, and what it may use.

A position is one chunk of the prompt. Decides, from these states alone, how long the hit can still
become and which positions it needs; changes no memory.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeep.core.common_prefix import need_at
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import ReadLease, Session, usable
from kvkeep.types import ChunkHash, Reason, RowSpec, TicketId


class Place(enum.Enum):
    """What a pending lookup knows of one position."""

    UNKNOWN = 0  # not in L1; L2 has not answered yet, or the hit cannot reach it
    HELD = 1  # reserved under the ticket's lease
    WANTED = 2  # to be fetched, or being fetched
    LOST = 3  # it will not be part of the hit


@dataclass(eq=False, slots=True)
class Ticket:
    """One pending lookup."""

    id: TicketId
    session: Session
    request: str
    hashes: list[ChunkHash]
    salt: str | None
    near: bool
    since_s: float
    deadline_s: float
    probed: bool = False  # the backends have answered
    lease: ReadLease | None = None
    places: list[Place] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)  # position -> what the lease holds
    tiers: dict[int, int] = field(default_factory=dict)  # position -> 1 + backend
    reasons: dict[int, Reason] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)  # position -> backends that have it
    queue: deque[int] = field(default_factory=deque)  # wanted, and not being fetched yet
    asked: list[int] = field(default_factory=list)  # positions in the question to the backends

    def wanted(self) -> list[int]:
        """Positions that are awaited."""
        return [i for i, place in enumerate(self.places) if place is Place.WANTED]

    def reachable(self) -> int:
        """How long the hit is when everything wanted comes."""
        good = (Place.HELD, Place.WANTED)
        return usable(self.session, [place in good for place in self.places])

    def reached(self) -> int:
        """How long the hit is now."""
        return usable(self.session, [place is Place.HELD for place in self.places])


def needed_from(rows: Sequence[RowSpec], length: int) -> int:
    """The first position that some row must hold for a hit of `length`."""
    return length - max((need_at(spec, length) for spec in rows), default=0)
