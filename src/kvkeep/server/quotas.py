"""Answers what operators ask about quotas, and does what they order: list, set, unset.

An order is first written to the quota file and then obeyed, one after the other, so that what was
confirmed is what the next start finds. Without a file it holds until the server ends, and the
answer says so. Who a tenant is, is shown by name only to operators; all else sees digests.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any

import msgspec

from kvkeep.backends.checked import Store
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.core.quota import OTHERS, in_bytes
from kvkeep.limits import parse_amount
from kvkeep.server import quota_book
from kvkeep.server.overview import Log
from kvkeep.server.quota_book import Limits, QuotaBook, Salt, digest_of
from kvkeep.types import printable
from kvkeep.wire import messages as m

MOST_ROWS = 1_000  # tenants in one answer, those with the most bytes

Send = Callable[[m.Answer | m.Failed], None]


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The argument of quota_set and quota_unset; a limit that is absent stays as it is."""

    salt: str
    l1: str | None = None
    l2: str | None = None


class Quotas:
    """The quotas of one server: its book, its L1, its backends."""

    def __init__(
        self,
        book: QuotaBook,
        directory: Directory,
        *,
        apply: Callable[[ev.Event], ev.Reply],
        stores: Sequence[Store],
        log: Log,
    ) -> None:
        self.book = book
        self._d = directory
        self._apply = apply
        self._stores = stores
        self._log = log
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Tell the core what the book says."""
        for event in self.book.events():
            self._apply(event)

    # ---- orders

    def ask(self, message: m.Query, send: Send) -> None:
        """Answer now, or when it is written."""
        seq = message.seq
        if message.what == "quota":
            send(_answer(seq, self.listing()))
            return
        try:
            order = msgspec.json.decode(message.argument, type=_Order)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            send(m.Failed(seq, f"{message.what}: the argument is not an order ({error})"))
            return
        unset = message.what == "quota_unset"
        why = self._problem(order, unset=unset)
        if why:
            send(m.Failed(seq, why))
        elif self.book.path is None:
            send(_answer(seq, self._obey(order, unset=unset)))
        else:
            task = asyncio.get_running_loop().create_task(self._keep(order, seq, send, unset=unset))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _problem(self, order: _Order, *, unset: bool) -> str:
        shown = printable(order.salt)[:64]
        own = self.book.own
        if why := quota_book.name_problem(order.salt):
            return why
        if unset:
            known = quota_book.named(order.salt) in own
            return "" if known else f'"{shown}" has no limit of its own: see kvkeep quota'
        given = {"l1": order.l1, "l2": order.l2}
        texts = {tier: text for tier, text in given.items() if text is not None}
        if not texts:
            return f'say what "{shown}" may take: l1, l2 or both, such as 10% or 50GiB'
        if len(own) >= quota_book.MOST_TENANTS and quota_book.named(order.salt) not in own:
            return f"{len(own)} tenants have limits of their own, which is the most: unset some"
        if order.l2 is not None and not self._stores:
            return (
                "this server has no L2 that could be limited: leave out l2, or start it with --l2"
            )
        return next(filter(None, map(quota_book.problem, texts, texts.values())), "")

    async def _keep(self, order: _Order, seq: int, send: Send, *, unset: bool) -> None:
        async with self._turn:
            path = self.book.path
            assert path is not None
            salt = quota_book.named(order.salt)
            text = self.book.text_with(salt, self._new(order, unset=unset))
            try:
                await asyncio.get_running_loop().run_in_executor(None, quota_book.write, path, text)
            except OSError as error:
                why = f"{path} cannot be written ({error.strerror}): nothing was changed"
                send(m.Failed(seq, f"{why}; let the server's user write there, or set quota.file"))
                return
            send(_answer(seq, self._obey(order, unset=unset)))

    def _obey(self, order: _Order, *, unset: bool) -> dict[str, Any]:
        salt = quota_book.named(order.salt)
        self._apply(self.book.enter(salt, self._new(order, unset=unset)))
        digest = digest_of(salt)
        self._log("quota_unset" if unset else "quota_set", tenant=digest, l1=order.l1, l2=order.l2)
        path = self.book.path
        return {
            "kept": path is not None,
            "file": "" if path is None else str(path),
            "tenant": self._row(digest, salt, self._held(digest)),
        }

    def _new(self, order: _Order, *, unset: bool) -> Limits | None:
        if unset:
            return None
        old = self.book.own.get(quota_book.named(order.salt), Limits())
        return replace(old, l1=order.l1 or old.l1, l2=order.l2 or old.l2)

    # ---- what people see

    def listing(self) -> dict[str, Any]:
        """The answer of `kvkeep quota --json`."""
        core, book = self._d.quotas, self.book
        salts: dict[str, Salt] = {_digest(s): s for s in {*core.tenants(), *book.own}}
        held = self._held()
        used: dict[str, int] = {d: core.used_bytes(s) for d, s in salts.items()}
        for tenants in held.values():
            for digest, row in tenants.items():
                used[digest] = used.get(digest, 0) + int(row["used_bytes"])
        shown = nlargest(MOST_ROWS, used, key=lambda digest: (used[digest], digest))
        return {
            "file": "" if book.path is None else str(book.path),
            "default": {"l1": book.defaults.l1, "l2": book.defaults.l2},
            "backends": [
                {"name": store.name, "keeps_quotas": store.name in held} for store in self._stores
            ],
            "tenants": [self._row(d, salts.get(d), held, known=d in salts) for d in shown],
            "left_out": len(used) - len(shown),
        }

    def refused(self) -> list[dict[str, Any]]:
        """Refusals of every tenant that had any, in L1 and in each backend; digests only."""
        counts = self._d.quotas.refused
        rows: list[dict[str, Any]] = [
            {"tier": "l1", "backend": "", "tenant": _digest(salt), "refused": count}
            for salt, count in counts.items()
        ]
        for store in self._stores:
            counted = store.tenanted.refused_puts() if store.tenanted is not None else {}
            rows += [
                {"tier": "l2", "backend": store.name, "tenant": digest, "refused": count}
                for digest, count in counted.items()
            ]
        return rows

    def _held(self, only: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """By backend that keeps quotas, and digest: what the tenant has there."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for store in self._stores:
            if store.tenanted is not None:
                found[store.name] = {
                    tenant.digest: {
                        "used_bytes": tenant.used_bytes,
                        "refused": tenant.refused_objects,
                        "evicted": tenant.evicted_objects,
                    }
                    for tenant in store.tenanted.tenants()
                    if only in (None, tenant.digest)
                }
        return found

    def _row(
        self,
        digest: str,
        salt: Salt,
        held: dict[str, dict[str, dict[str, Any]]],
        *,
        known: bool = True,
    ) -> dict[str, Any]:
        core, own = self._d.quotas, self.book.own.get(salt, Limits()) if known else Limits()
        nothing = {"used_bytes": 0, "refused": 0, "evicted": 0}
        l2 = []
        for store in self._stores:
            if store.name in held:
                capacity = store.usage().capacity_bytes
                limit = _limit(own.l2, self.book.defaults.l2, capacity)
                there = held[store.name].get(digest, nothing)
                l2.append({"backend": store.name, **limit, **there})
        return {
            "tenant": digest,
            "salt": salt if known and salt != OTHERS else None,
            "l1": {
                **_limit(own.l1, self.book.defaults.l1, self._d.arena.populated_bytes),
                "used_bytes": core.used_bytes(salt) if known else 0,
                "staged_bytes": core.staged_bytes[salt] if known else 0,
                "refused": core.refused[salt] if known else 0,
                "evicted": core.evicted[salt] if known else 0,
            },
            "l2": l2,
        }


def _limit(own: str | None, default: str | None, capacity_bytes: int | None) -> dict[str, Any]:
    text = own or default or ""
    limit_bytes = None if capacity_bytes is None else in_bytes(parse_amount(text), capacity_bytes)
    return {"limit": text, "from": "default" if own is None else "own", "limit_bytes": limit_bytes}


def _digest(salt: Salt) -> str:
    return "others" if salt == OTHERS else digest_of(salt)


def _answer(seq: int, body: object) -> m.Answer:
    return m.Answer(seq, msgspec.json.encode(body).decode())
