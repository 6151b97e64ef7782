"""Remembers, for a bounded number of requests, what was asked, what was found and why not more.

Feeds `kvkeep explain`. Decides nothing; forgets the oldest request first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kvkeep.types import Reason, Tier

REQUESTS = 4_096
_EVENTS_PER_REQUEST = 64
_NAME_CHARS = 256  # request ids and event texts are cut to this: memory stays bounded


@dataclass(slots=True)
class Record:
    """One request: its last lookup, what was loaded, and its events."""

    request: str
    since_s: float
    prompt_tokens: int = 0
    hit_chunks: int = 0
    reasons: bytes = b""
    device_tokens: int = 0
    loaded_tokens: int = 0
    saved_ms: float | None = None
    events: list[tuple[float, str]] = field(default_factory=list)

    def add(self, now_s: float, text: str) -> None:
        """Append one event; beyond the bound the last one is replaced."""
        if len(self.events) >= _EVENTS_PER_REQUEST:
            self.events.pop()
        self.events.append((now_s - self.since_s, text[:_NAME_CHARS]))


class Timeline:
    """Records by request id, newest last."""

    def __init__(self, most: int = REQUESTS) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._most = most

    def record(self, request: str, now_s: float) -> Record:
        """The request's record, made when it is new."""
        request = request[:_NAME_CHARS]
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = Record(request, now_s)
            if len(self._records) > self._most:
                self._records.popitem(last=False)
        return record

    def explain(self, request: str) -> dict[str, Any]:
        """The answer of `kvkeep explain --json`; "" means the newest request.

        A unique beginning of an id will do. Raises KeyError with a sentence otherwise.
        """
        record = self._find(request)
        chunks: list[dict[str, Any]] = [
            {"index": i, "outcome": "hit", "tier": Tier.L1.value, "reason": None, "detail": ""}
            for i in range(record.hit_chunks)
        ]
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
            "prompt_tokens": record.prompt_tokens,
            "hit_tokens": {"device": record.device_tokens, "l1": record.loaded_tokens, "l2": {}},
            "chunks": chunks,
            "timeline": [{"t_ms": round(t * 1e3, 3), "event": e} for t, e in record.events],
            "saved_ms": record.saved_ms,
        }

    def _find(self, request: str) -> Record:
        if not self._records:
            raise KeyError("no request has been seen since the server started")
        if not request:
            return next(reversed(self._records.values()))
        if request in self._records:
            return self._records[request]
        matches = [r for name, r in self._records.items() if name.startswith(request)]
        if len(matches) != 1:
            count = "no request" if not matches else f"{len(matches)} requests"
            raise KeyError(f"{count} of the last {len(self._records)} begins with {request!r}")
        return matches[0]


_DETAIL = {
    Reason.NEVER_STORED: "no engine has stored this chunk in this epoch",
    Reason.EVICTED: "it was resident and left L1 to make room, or was cleared",
    Reason.L2_MISS: "no external storage has it",
    Reason.L2_TIMEOUT: "external storage did not answer in time",
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
}
