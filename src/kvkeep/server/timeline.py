"""Remembers, for a bounded number of requests, what was asked, what was found and why not more.

Feeds `kvkeep explain`. Decides nothing; forgets the oldest request first. Ids are only unique in
their session. Names and events come from clients: they are kept without control characters.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvkeep.types import Reason, Tier, printable

REQUESTS = 4_096
_EVENTS_PER_REQUEST = 64
_NAME_CHARS = 256  # request ids and event texts are cut to this: memory stays bounded
_NAMED = 3  # ids in a sentence that asks for more of one


@dataclass(slots=True)
class Record:
    """One request: its last lookup, what was loaded, and its events."""

    session: str
    request: str
    since_s: float
    at_s: float  # the same moment as a wall clock shows it
    prompt_tokens: int = 0
    hit_chunks: int = 0
    reasons: bytes = b""
    tiers: bytes = b""  # of each chunk of the hit: 0 for L1, n for the n-th backend
    chunk_tokens: int = 0  # 0: unknown
    device_tokens: int = 0
    loaded_tokens: int = 0
    saved_ms: float | None = None
    ended: bool = False  # the lookup's hit was used or given back: the token counts are final
    events: list[tuple[float, str]] = field(default_factory=list)

    def add(self, now_s: float, text: str) -> None:
        """Append one event; beyond the bound the last one is replaced."""
        if len(self.events) >= _EVENTS_PER_REQUEST:
            self.events.pop()
        self.events.append((now_s - self.since_s, _name(text)))

    def count(self, now_s: float, what: str) -> None:
        """One more of `what`; consecutive ones share an event."""
        last = self.events[-1][1] if self.events else ""
        number = last.removesuffix(f" {_name(what)}")
        if number != last and number.isdigit():
            self.events.pop()
            self.add(now_s, f"{int(number) + 1} {what}")
        else:
            self.add(now_s, f"1 {what}")


class Timeline:
    """Records by session and request id, newest last."""

    def __init__(self, most: int = REQUESTS) -> None:
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()
        self._most = most
        self.forgotten = 0  # records that made room

    def record(self, session: str, request: str, now_s: float, at_s: float) -> Record:
        """The request's record, made when it is new."""
        key = _name(session), _name(request)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = Record(*key, now_s, at_s)
            if len(self._records) > self._most:
                self._records.popitem(last=False)
                self.forgotten += 1
        return record

    def known(self, session: str, request: str) -> Record | None:
        """The request's record, if it is remembered."""
        return self._records.get((_name(session), _name(request)))

    def explain(self, request: str, backends: Sequence[str] = ()) -> dict[str, Any]:
        """The answer of `kvkeep explain --json`; "" means the newest request.

        A unique beginning of an id will do. Raises KeyError with a sentence otherwise.
        """
        record = self._find(request)
        chunks: list[dict[str, Any]] = [
            {
                "index": i,
                "outcome": "hit",
                "tier": f"{Tier.L2.value}:{backends[tier - 1]}" if tier else Tier.L1.value,
                "reason": None,
                "detail": "",
            }
            for i, tier in enumerate(record.tiers)
        ]
        from_l2 = _tokens_from_l2(record, backends)
        for index, code in enumerate(record.reasons, start=record.hit_chunks):
            reason = Reason(code)
            chunks.append(
                {
                    "index": index,
                    "outcome": "miss",
                    "tier": None,
                    "reason": reason.name.lower(),
                    "detail": _DETAIL[reason],
                }
            )
        return {
            "request": record.request,
            "session": record.session,
            "at": datetime.fromtimestamp(record.at_s, UTC).isoformat(timespec="milliseconds"),
            "prompt_tokens": record.prompt_tokens,
            "hit_tokens": {
                "device": record.device_tokens,
                "l1": record.loaded_tokens - sum(from_l2.values()),
                "l2": from_l2,
            },
            "computed_tokens": _computed_tokens(record),
            "chunks": chunks,
            "timeline": [
                {"t_ms": max(0.0, round(t * 1e3, 3)), "event": e} for t, e in record.events
            ],
            "saved_ms": record.saved_ms,
        }

    def _find(self, request: str) -> Record:
        if not self._records:
            raise KeyError("no request has been seen since the server started")
        if not request:
            return next(reversed(self._records.values()))
        start = _name(request)
        newest: dict[str, Record] = {}  # by id, newest first
        for record in reversed(self._records.values()):
            if record.request.startswith(start):
                newest.setdefault(record.request, record)
        if start in newest:
            return newest[start]
        if len(newest) == 1:
            return next(iter(newest.values()))
        raise KeyError(_not_found(request, list(newest), len(self._records)))


def _name(text: str) -> str:
    return printable(text[:_NAME_CHARS])[:_NAME_CHARS]


def _not_found(request: str, found: list[str], known: int) -> str:
    start = repr(request[:_NAME_CHARS])
    if not found:
        return (
            f"no request of the last {known} begins with {start}: it was not looked up (shorter "
            "than one chunk, or the engine was not ready) or is forgotten"
        )
    more = ", ..." if len(found) > _NAMED else ""
    return (
        f"{len(found)} requests of the last {known} begin with {start}: type more of it "
        f"(newest first: {', '.join(found[:_NAMED])}{more})"
    )


def _tokens_from_l2(record: Record, backends: Sequence[str]) -> dict[str, int]:
    """Of the loaded tokens, those whose chunks came from each backend for this request."""
    start = record.device_tokens
    end, size = start + record.loaded_tokens, record.chunk_tokens
    tokens: dict[str, int] = {}
    for index, tier in enumerate(record.tiers if size else b""):
        overlap = min(end, (index + 1) * size) - max(start, index * size)
        if tier and overlap > 0:
            name = backends[tier - 1]
            tokens[name] = tokens.get(name, 0) + overlap
    return tokens


def _computed_tokens(record: Record) -> int | None:
    """What the engine had to compute of the prompt, once that is known."""
    if not record.ended:
        return None
    return max(0, record.prompt_tokens - record.device_tokens - record.loaded_tokens)


_DETAIL = {
    Reason.NEVER_STORED: "no engine has stored this chunk in this epoch",
    Reason.EVICTED: "it was resident and left L1 to make room, or was cleared",
    Reason.L2_MISS: "no external storage has it",
    Reason.L2_TIMEOUT: "external storage did not answer in the time that the request had for it",
    Reason.L2_ERROR: "external storage failed",
    Reason.CORRUPT: "it failed to load or to verify and was dropped",
    Reason.LAYOUT_MISMATCH: "the key exists with another layout",
    Reason.RANK_SHORT: "another rank does not have it",
    Reason.GROUP_SHORT: "another KV group does not have what it needs here",
    Reason.NO_ROOM: "no more may be reserved for this session",
    Reason.COST_GATE: "computing it is faster than loading it",
    Reason.POLICY: "the request uses something that kvkeep neither looks up nor stores",
    Reason.NOT_READY: "not every rank of the session has said Hello in this epoch",
    Reason.REVOKED: "its reservation was revoked",
    Reason.OVER_QUOTA: "external storage has it, and its tenant may have no more in L1",
    Reason.BEHIND: "it is there, but a chunk before it is not",
}
