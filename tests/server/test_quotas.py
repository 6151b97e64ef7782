"""Orders about quotas: one after the other, kept or refused as a whole; long lists are cut."""

import asyncio
import os
import tomllib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvkeep.backends.base import TenantLimits, TenantUsage
from kvkeep.backends.checked import Store
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import compose
from kvkeep.cli.show import show_quotas
from kvkeep.config import QuotaConfig
from kvkeep.core.directory import Directory
from kvkeep.server import quota_book, quotas
from kvkeep.server.quota_book import Limits, QuotaBook
from kvkeep.server.quotas import Quotas
from kvkeep.testing.faulty_backend import FaultyBackend
from kvkeep.wire import messages as m

Reply = m.Answer | m.Failed


class Desk:
    """The quotas of a directory with nothing in it."""

    def __init__(self, file: Path | None, stores: Sequence[Store] = ()) -> None:
        ids = count(1)
        self.directory = Directory([0] * 16, lambda: next(ids))
        self.book = QuotaBook(QuotaConfig(file=str(file) if file else ""))
        self.quotas = Quotas(
            self.book,
            self.directory,
            apply=lambda event: self.directory.handle(event, 0.0)[0],
            stores=stores,
            log=lambda event, **fields: None,
        )
        self.quotas.start()

    async def ask(self, what: str, **order: object) -> Reply:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        argument = msgspec.json.encode(order).decode() if order else ""
        self.quotas.ask(m.Query(1, what, argument), answer.set_result)
        return await answer


class Kept(FaultyBackend):
    """One that found objects of two tenants at its start."""

    def limit_tenants(self, limits: TenantLimits) -> None:
        pass

    def tenants(self) -> Sequence[TenantUsage]:
        return [TenantUsage("", 7), TenantUsage("0123456789abcdef", 5)]

    def refused_puts(self) -> Mapping[str, int]:
        return {}


def store() -> Store:
    return compose(Kept(), settings=GuardSettings(), log=lambda event, **fields: None)


def body(reply: Reply) -> Any:
    assert isinstance(reply, m.Answer), reply
    return msgspec.json.decode(reply.body)


async def test_orders_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "q.toml"
    desk = Desk(file, [store()])
    orders = [desk.ask("quota_set", salt=f"t{n}", l1=f"{n + 1}%") for n in range(20)]
    assert all(body(reply)["kept"] for reply in await asyncio.gather(*orders))
    assert tomllib.loads(file.read_text()) == {f"t{n}": {"l1": f"{n + 1}%"} for n in range(20)}
    both = desk.ask("quota_unset", salt="t3"), desk.ask("quota_set", salt="t4", l2="7%")
    assert all(body(reply)["kept"] for reply in await asyncio.gather(*both))
    again = Desk(file)
    assert again.book.own == desk.book.own
    assert again.book.own["t4"] == Limits("5%", "7%")
    assert "t3" not in again.book.own
    assert again.directory.quotas.own == desk.directory.quotas.own


async def test_what_cannot_be_written_is_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path / "q.toml")
    await desk.ask("quota_set", salt="t", l1="10%")

    def full(fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    reply = await desk.ask("quota_set", salt="t", l1="20%")
    assert isinstance(reply, m.Failed)
    assert "No space left on device): nothing was changed" in reply.text
    assert desk.book.own == {"t": Limits("10%")}
    assert [path.name for path in tmp_path.iterdir()] == ["q.toml"]
    assert tomllib.loads((tmp_path / "q.toml").read_text()) == {"t": {"l1": "10%"}}


@pytest.mark.parametrize(
    "order",
    [
        {"salt": 7, "l1": "1%"},
        {"l1": "1%"},
        {"salt": "t", "l9": "1%"},
        {"salt": "t", "l1": 5},
        {"salt": "t"},
        {"salt": "t", "l1": "-1"},
    ],
)
async def test_a_wrong_order_is_refused(order: dict[str, object]) -> None:
    desk = Desk(None)
    assert isinstance(await desk.ask("quota_set", **order), m.Failed)
    assert isinstance(await desk.ask("quota_unset", salt="t"), m.Failed)
    assert isinstance(await desk.ask("quota_set"), m.Failed)  # no order at all
    assert (desk.book.own, desk.directory.quotas.own) == ({}, {})


async def test_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quota_book, "MOST_TENANTS", 3)
    monkeypatch.setattr(quotas, "MOST_ROWS", 2)
    desk = Desk(tmp_path / "q.toml")
    for n in range(3):
        body(await desk.ask("quota_set", salt=f"t{n}", l1="1%"))
    reply = await desk.ask("quota_set", salt="t3", l1="1%")
    assert isinstance(reply, m.Failed)
    assert "unset some" in reply.text
    body(await desk.ask("quota_set", salt="t2", l1="2%"))  # one of them may change
    listed = body(await desk.ask("quota"))
    assert (len(listed["tenants"]), listed["left_out"]) == (2, 1)


async def test_an_empty_name_is_no_salt() -> None:
    desk = Desk(None, [store()])
    row = body(await desk.ask("quota_set", salt="", l1="50%", l2="1%"))["tenant"]
    assert (row["tenant"], row["salt"]) == ("", None)
    assert desk.book.own == {None: Limits("50%", "1%")}
    assert desk.book.limit_bytes("", 1000) == 10
    body(await desk.ask("quota_set", salt="t", l2="50%"))
    assert desk.book.limit_bytes(quota_book.digest_of("t"), 1000) == 500
    assert desk.book.limit_bytes("0123456789abcdef", 1000) is None  # everything, by default


async def test_after_a_restart_who_has_no_salt_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Who has one is known by its digest alone, until it is seen or is in the book."""
    desk = Desk(None, [store()])
    answer = body(await desk.ask("quota"))
    assert [(row["tenant"], row["salt"]) for row in answer["tenants"]] == [
        ("", None),
        ("0123456789abcdef", None),
    ]
    show_quotas(answer)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["(no", "salt)", "L1"] in [row[:3] for row in rows]
    assert ["?", "0123456789abcdef"] in [row[:2] for row in rows]


async def test_without_l2_there_is_nothing_to_limit_there() -> None:
    desk = Desk(None)
    reply = await desk.ask("quota_set", salt="t", l1="10%", l2="10%")
    assert isinstance(reply, m.Failed)
    assert "this server has no L2" in reply.text
    assert desk.book.own == {}
