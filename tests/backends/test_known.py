"""Which objects a store vouches for, so that they are not written again; and what others are told.

Where some of what is on the disk may be plain, or under a key that is gone, "it is there" must not
pass for "it is stored".
"""

import pytest
from tests.backends.test_encryption import (
    LENGTH,
    LIMIT_BYTES,
    NAME,
    A,
    B,
    put_one,
    read,
    store_over,
)
from tests.server.l2_world import World, filled, virtual, world

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.checked import Store
from kvkeep.backends.encrypted import Sealer
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.keyring import Key, Keyring
from kvkeep.backends.registry import compose
from kvkeep.testing.backend_contract import SPACE, key
from kvkeep.testing.faulty_backend import FaultyBackend
from kvkeep.types import IoOutcome, Role
from kvkeep.wire import messages as m

OK, CORRUPT, MISSING = IoOutcome.OK, IoOutcome.CORRUPT, IoOutcome.MISSING


async def holds(store: Store, number: int = 1) -> bool:
    return list(await store.holds(SPACE, [key(number)])) == [True]


async def test_of_many_the_one_used_last_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.backends.known.KNOWN_MOST", 3)
    store = store_over(FaultyBackend(), A)
    for number in range(5):
        await put_one(store, number)
    assert [await holds(store, n) for n in range(5)] == [False, False, True, True, True]
    assert await holds(store, 2)  # so 3 is the oldest now
    await put_one(store, 0)
    assert [await holds(store, n) for n in range(5)] == [True, False, True, False, True]


@pytest.mark.parametrize("by", [None, B])
async def test_what_is_there_is_vouched_for_only_when_it_can_be_read(by: Key | None) -> None:
    raw = FaultyBackend(later=by is B)
    keys = [by] if by else []
    await put_one(store_over(raw, *keys))
    store = store_over(raw, A)
    assert not await holds(store)  # nobody has read it yet
    assert await read(store) is MISSING
    assert not await holds(store)
    await put_one(store)
    assert await holds(store)
    assert store.status()["unreadable_now"] == {}
    again = store_over(raw, A)
    assert not await holds(again)
    assert await read(again) is OK
    assert await holds(again)
    await again.delete(SPACE, [key(1)])
    assert not await holds(again)
    await put_one(again)
    await again.forget(SPACE)
    await put_one(store)  # as if by another server
    assert not await holds(again)
    raw.objects[NAME] = raw.objects[NAME][0], bytes(LENGTH)
    assert await read(store) is CORRUPT
    assert not await holds(store)


async def test_without_encryption_all_is_vouched_for_until_one_is_unreadable() -> None:
    raw = FaultyBackend()
    for number in (1, 2):
        await put_one(store_over(raw), number)
    await put_one(store_over(raw, A), 3)
    store = store_over(raw)
    assert await holds(store, 1)
    assert await read(store, 3) is MISSING
    assert not await holds(store, 1)
    assert await read(store, 1) is OK
    assert [await holds(store, n) for n in (1, 2, 3)] == [True, False, False]


def with_keys(w: World, raw: FaultyBackend, *keys: Key, limit_bytes: int = LIMIT_BYTES) -> None:
    """The server of this world was restarted with these keys."""
    sealer = Sealer(Keyring(keys), buffer_bytes=limit_bytes)
    w.io.stores[0] = compose(raw, settings=GuardSettings(), log=w.log, sealer=sealer)


@virtual
async def test_what_is_stored_again_is_written_over_what_cannot_be_read() -> None:
    """Also when nobody asked for it before, so that nobody knows that it cannot be read."""
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        operator = w.join("other", Role.OPERATOR)
        with_keys(w, raw, A)
        await w.store(engine, keys)
        assert (await w.persisted(operator))["done"]
        await w.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
        assert (await w.find(engine, keys)).chunks == 3
        with_keys(w, raw, B)
        await w.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
        assert (await w.find(engine, keys)).chunks == 0
        [problem] = w.service.status()["problems"]
        assert "objects cannot be read (no_key: " in problem
        assert "l2.key_file" in problem
        await w.store(engine, keys)
        assert (await w.persisted(operator))["done"]
        assert w.service.status()["problems"] == []


@virtual
async def test_an_object_that_never_fits_is_a_problem_that_says_what_is_needed() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        with_keys(w, raw, A, limit_bytes=PAGE_BYTES)
        await w.store(engine, keys)
        await w.until(lambda: w.directory.persister.idle)
        [problem] = w.service.status()["problems"]
        assert "l2.encrypt_buffer_bytes" in problem
        assert "5000 bytes" in problem
        assert "set it to 8192 or more" in problem
        said = [fields for event, fields in w.lines if event == "l2_too_large_to_encrypt"]
        assert [line["object_bytes"] for line in said] == [5_000]
