"""Encrypted L2: what comes back is what was put, or nothing; keys come, go and come back."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.servers import kvkeep_env
from xxhash import xxh3_128_digest

from kvkeep.backends import header as pages
from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.checked import POOL_WAIT_S, Store, Wanted
from kvkeep.backends.encrypted import BouncePool, Sealer, sealers
from kvkeep.backends.guarded import GuardSettings, Late
from kvkeep.backends.header import NONCE_BYTES, HeaderProblem, decode, label
from kvkeep.backends.keyring import Key, Keyring
from kvkeep.backends.known import KNOWN_MOST
from kvkeep.backends.registry import compose
from kvkeep.errors import ConfigError
from kvkeep.testing import virtual_loop
from kvkeep.testing.backend_contract import OTHER, SALTED, SPACE, item, key, pattern
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Switched, flipped
from kvkeep.types import IoOutcome, Namespace

OK, CORRUPT, MISSING = IoOutcome.OK, IoOutcome.CORRUPT, IoOutcome.MISSING
MISMATCH, REFUSED, FULL = IoOutcome.LAYOUT_MISMATCH, IoOutcome.REFUSED, IoOutcome.FULL
LENGTH = 2 * PAGE_BYTES + 77
NAME = (label(SPACE), key(1))
A, B = Key("a", b"a" * 32), Key("b", b"b" * 32)
A_AGAIN = Key("a", b"c" * 32)  # another key of the same name
LIMIT_BYTES = 1 << 20


async def inline(job: Callable[[], list[bytes]]) -> list[bytes]:
    return job()


def quiet(event: str, **fields: Any) -> None:
    """No log."""


def store_over(
    raw: FaultyBackend, *keys: Key, limit_bytes: int = LIMIT_BYTES, put_timeout_s: float = 1.0
) -> Store:
    sealer = Sealer(Keyring(keys), buffer_bytes=limit_bytes) if keys else None
    deadlines = GuardSettings(put_timeout_s=put_timeout_s)
    return compose(raw, settings=deadlines, log=quiet, offload=inline, sealer=sealer)


def wanted(
    number: int = 1, *, length: int = LENGTH, space: Namespace = SPACE, seed: int | None = None
) -> Wanted:
    """An object's memory: noise, or with a seed its content."""
    memory = item(space, key(number), length).payload
    if seed is not None:
        memory[:length] = pattern(seed, length)
    return Wanted(space, key(number), memory, length, depth=number)


async def put_one(store: Store, number: int = 1, *, length: int = LENGTH) -> None:
    assert list(await store.put([wanted(number, length=length, seed=number)])) == [OK]


async def read(store: Store, number: int = 1, *, length: int = LENGTH) -> IoOutcome:
    """How it ends; an OK has the right bytes."""
    target = wanted(number, length=length)
    (outcome,) = await store.get([target])
    assert outcome is not OK or target.payload[:length] == pattern(number, length)
    return outcome


def contains(store: Store, number: int = 1) -> bool:
    answer = store.contains(SPACE, [key(number)])
    assert not isinstance(answer, Awaitable)
    return answer[0]


def stored(length: int = LENGTH, by: Key = A) -> FaultyBackend:
    """A backend with object 1, encrypted."""
    raw = FaultyBackend()
    asyncio.run(put_one(store_over(raw, by), length=length))
    return raw


@pytest.mark.parametrize("length", [1, 15, 16, PAGE_BYTES, LENGTH, 300_000])
def test_round_trip(length: int) -> None:
    async def main() -> None:
        raw = FaultyBackend()
        store = store_over(raw, A)
        source = wanted(length=length, seed=1)
        before = bytes(source.payload)
        assert list(await store.put([source])) == [OK]
        assert source.payload == before  # resident bytes never change
        assert await read(store, length=length) is OK
        _, payload = raw.objects[NAME]
        assert len(payload) == length
        assert payload != pattern(1, length) or length == 1
        assert status_of(store)["sealed"] == 1

    virtual_loop.run(main())


async def test_large_objects_are_encrypted_in_threads_by_default() -> None:
    sealer = Sealer(Keyring([A]), buffer_bytes=4 << 20)
    store = compose(FaultyBackend(), settings=GuardSettings(), log=quiet, sealer=sealer)
    large = [wanted(n, length=900_000 + n, seed=n) for n in range(1, 9)]
    assert list(await store.put(large)) == [OK] * 8
    targets = [wanted(n, length=900_000 + n) for n in range(1, 9)]
    assert list(await store.get(targets)) == [OK] * 8
    assert all(t.payload[: t.length] == pattern(n, t.length) for n, t in enumerate(targets, 1))
    assert 0 < sealer.pool.mapped_bytes <= 4 << 20


async def test_nothing_of_the_content_is_on_the_disk() -> None:
    """Equal content gives other bytes each time: no checksum and no ciphertext repeats."""
    raw = FaultyBackend()
    store = store_over(raw, A)
    seen: Counter[bytes] = Counter()
    for _ in range(20):
        await put_one(store)
        page, payload = raw.objects[NAME]
        found = decode(memoryview(page))
        assert not isinstance(found, HeaderProblem)
        assert found.seal is not None
        assert (found.seal.key_id, found.seal.key_check) == ("a", A.check)
        content = pattern(1, LENGTH)
        assert found.checksum != xxh3_128_digest(content)
        assert A.secret not in page
        seen.update([found.seal.nonce, found.checksum, payload[:64]])
        assert len(found.seal.nonce) == NONCE_BYTES
    assert set(seen.values()) == {1}


# ---- damage


def test_a_flip_of_any_bit_of_the_page_is_never_served() -> None:
    """Also when whoever flipped it made the page's own checksum right again."""

    raw = stored()

    async def main() -> None:
        page, payload = raw.objects[NAME]
        chosen = random.Random(4)
        used = [n for n in range(HEADER_BYTES - 16) if page[n] or n < 220 or n > 4_020]
        for byte in used + chosen.sample(range(HEADER_BYTES - 16), 100):
            changed = bytearray(flipped(page, 8 * byte + chosen.randrange(8)))
            for is_mended in (False, True):
                if is_mended:
                    changed[-16:] = xxh3_128_digest(changed[:-16])
                raw.objects[NAME] = bytes(changed), payload
                assert await read(store_over(raw, A)) in (CORRUPT, MISMATCH, MISSING), byte
        raw.objects[NAME] = page, payload
        assert await read(store_over(raw, A)) is OK

    asyncio.run(main())


@given(st.integers(0, 8 * LENGTH - 1))
@settings(max_examples=60, deadline=None)
def test_a_flip_of_any_bit_of_the_payload_is_never_served(bit: int) -> None:
    raw = stored()
    page, payload = raw.objects[NAME]
    raw.objects[NAME] = page, flipped(payload, bit)
    store = store_over(raw, A)
    assert asyncio.run(read(store)) is CORRUPT
    assert store.status()["corrupt"] == {"tag": 1}
    assert not raw.objects  # set aside, as any broken object


@pytest.mark.parametrize("bit", [0, 61, 127])
def test_another_tag_or_nonce_is_never_served(bit: int) -> None:
    raw = stored()
    page, payload = raw.objects[NAME]
    found = decode(memoryview(page))
    assert not isinstance(found, HeaderProblem)
    assert found.seal is not None
    nonce = flipped(found.seal.nonce, bit % 96)
    for changed in (
        replace(found, checksum=flipped(found.checksum, bit)),
        replace(found, seal=replace(found.seal, nonce=nonce)),
        replace(found, seal=replace(found.seal, key_id="b")),
        replace(found, depth=found.depth + 1),
        replace(found, model="another"),
    ):
        raw.objects[NAME] = bytes(encoded(changed)), payload
        store = store_over(raw, A)
        assert asyncio.run(read(store)) is CORRUPT
        assert store.status()["corrupt"] == {"tag": 1}


def encoded(found: pages.Header) -> memoryview:
    page = memoryview(bytearray(HEADER_BYTES))
    pages.encode(page, found)
    return page


@pytest.mark.parametrize("space", [SPACE, SALTED, OTHER])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_mended", [False, True])
def test_an_object_in_another_place_never_opens(
    space: Namespace, number: int, *, is_mended: bool
) -> None:
    """Under another key, salt or layout; also with a page that says it belongs there."""
    raw = stored()
    page, payload = raw.objects[NAME]
    if is_mended:
        found = decode(memoryview(page))
        assert not isinstance(found, HeaderProblem)
        salt = pages.salt_digest(space.salt)
        page = bytes(
            encoded(
                replace(found, fingerprint=space.fingerprint, salt_digest=salt, key=key(number))
            )
        )
    raw.objects[label(space), key(number)] = page, payload
    store = store_over(raw, A)
    target = wanted(number, space=space)
    (outcome,) = asyncio.run(get(store, target))
    if space is SPACE and number == 1:
        assert outcome is OK
    else:
        assert outcome in (CORRUPT, MISMATCH)
        assert target.payload[:LENGTH] != pattern(1, LENGTH)  # not even where nobody looks


async def get(store: Store, *targets: Wanted) -> list[IoOutcome]:
    return list(await store.get(targets))


# ---- keys that come and go


async def test_rotation_and_a_key_that_is_lost_and_found() -> None:
    raw = FaultyBackend()
    await put_one(store_over(raw, A), 1)
    rotated = store_over(raw, B, A)
    await put_one(rotated, 2)
    assert [await read(rotated, n) for n in (1, 2)] == [OK, OK]
    without = store_over(raw, B)
    assert [await read(without, n) for n in (1, 2)] == [MISSING, OK]
    assert without.status()["unreadable"] == {"no_key": 1}
    assert without.status()["corrupt"] == {}
    assert len(raw.objects) == 2  # neither deleted nor set aside
    assert [await read(store_over(raw, B, A), n) for n in (1, 2)] == [OK, OK]


async def test_another_key_of_the_same_name_opens_nothing_and_breaks_nothing() -> None:
    raw = FaultyBackend()
    await put_one(store_over(raw, A))
    wrong = store_over(raw, A_AGAIN)
    assert await read(wrong) is MISSING
    assert wrong.status()["unreadable"] == {"no_key": 1}
    assert await read(store_over(raw, A)) is OK


async def test_plain_objects_are_misses_and_are_written_anew() -> None:
    raw = FaultyBackend()
    await put_one(store_over(raw))
    store = store_over(raw, A)
    assert contains(store)
    assert await read(store) is MISSING
    assert store.status()["unreadable"] == {"not_encrypted": 1}
    assert NAME in raw.objects
    assert not contains(store)  # so the next store does not take it for done
    await put_one(store)
    assert contains(store)
    assert await read(store) is OK
    assert raw.objects[NAME][1] != pattern(1, LENGTH)


async def test_without_keys_encrypted_objects_are_misses() -> None:
    raw = FaultyBackend()
    await put_one(store_over(raw, A))
    store = store_over(raw)
    assert await read(store) is MISSING
    assert store.status()["unreadable"] == {"no_key": 1}
    assert store.status()["encryption"] is None
    assert await read(store_over(raw, A)) is OK


async def test_what_is_of_no_use_is_remembered_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert KNOWN_MOST == 1 << 16
    monkeypatch.setattr("kvkeep.backends.known.KNOWN_MOST", 3)
    raw = FaultyBackend()
    plain, store = store_over(raw), store_over(raw, A)
    for number in range(5):
        await put_one(plain, number)
        assert await read(store, number) is MISSING
    assert [contains(store, n) for n in range(5)] == [True, True, False, False, False]
    assert store.status()["unreadable"] == {"not_encrypted": 5}
    assert store.status()["unreadable_now"] == {"not_encrypted": 3}


def test_no_key_file_means_no_encryption() -> None:
    assert sealers("", 1 << 20) is None


def test_a_missing_library_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvkeep\[encryption\]'"):
        Sealer(Keyring([A]))


@pytest.mark.slow
def test_nobody_needs_the_library_who_does_not_encrypt() -> None:
    look = "import sys, kvkeep.server.run, kvkeep.cli.app; print('cryptography' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, env=kvkeep_env(), timeout=60
    )
    assert done.stdout == "False\n", done.stderr


# ---- memory to encrypt into


def status_of(store: Store) -> dict[str, Any]:
    found = store.status()["encryption"]
    assert found is not None
    return dict(found)


async def test_many_objects_share_little_memory() -> None:
    raw = FaultyBackend()
    store = store_over(raw, A, limit_bytes=4 * PAGE_BYTES)
    many = [wanted(n, seed=n) for n in range(9)]
    assert list(await store.put(many)) == [OK] * 9
    assert [await read(store, n) for n in range(9)] == [OK] * 9
    assert status_of(store) == {"key": "a", "keys": 1, "sealed": 9, "buffer_used_bytes": 12_288}
    assert store.status()["buffer_bytes"] == store.buffer_bytes == 4 * PAGE_BYTES


async def test_an_object_that_never_fits_is_refused_with_the_fix() -> None:
    store = store_over(FaultyBackend(), A, limit_bytes=2 * PAGE_BYTES)
    small, large = wanted(1, length=100, seed=1), wanted(2, seed=2)
    assert list(await store.put([large, small])) == [FULL, OK]
    assert "l2.encrypt_buffer_bytes" in store.status()["last_error"]


def test_a_write_that_hangs_keeps_its_memory_and_others_are_refused() -> None:
    async def main() -> None:
        raw = FaultyBackend(plan=Switched(Fault(Kind.NEVER), operation="put"))
        store = store_over(raw, A, limit_bytes=3 * PAGE_BYTES)
        with pytest.raises(Late) as late:
            await store.put([wanted(1, seed=1)])
        raw.plan = Switched()
        before_s = asyncio.get_running_loop().time()
        assert list(await store.put([wanted(2, seed=2)])) == [REFUSED]
        assert asyncio.get_running_loop().time() - before_s >= POOL_WAIT_S
        assert "writes hang" in store.status()["last_error"]
        waiting = asyncio.create_task(put_one(store, 3))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        raw.unstick()
        await late.value.settled
        await waiting
        assert await read(store, 3) is OK
        assert status_of(store)["buffer_used_bytes"] <= 3 * PAGE_BYTES

    virtual_loop.run(main())


@given(st.lists(st.integers(1, 5 * PAGE_BYTES), min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_pool_keeps_its_limit(lengths: list[int], seed: int) -> None:
    async def main() -> None:
        pool, chosen = BouncePool(8 * PAGE_BYTES), random.Random(seed)
        held: list[list[memoryview]] = []
        batches = list(pool.batches(lengths))
        assert [n for batch in batches for n in batch] == list(range(len(lengths)))
        for batch in batches:
            taken = None
            while taken is None:
                taken = await pool.take([lengths[n] for n in batch], 0.01)
                if taken is None:
                    pool.give_back(held.pop(chosen.randrange(len(held))))
            assert all(len(b) >= lengths[n] for n, b in zip(batch, taken, strict=True))
            held.append(taken)
            in_use = sum(len(buffer) for buffers in held for buffer in buffers)
            assert in_use <= pool.mapped_bytes <= pool.limit_bytes

    virtual_loop.run(main())


# ---- under faults


@pytest.mark.parametrize("kind", [Kind.SHORT, Kind.LONG, Kind.FLIPPED, Kind.OTHER_KEY])
@pytest.mark.parametrize("operation", ["get", "put"])
async def test_a_faulty_backend_gives_the_right_bytes_or_none(kind: Kind, operation: str) -> None:
    for place in range(0, 40, 3):
        raw = FaultyBackend()
        store = store_over(raw, A)
        await put_one(store, 2)
        if operation == "get":
            await put_one(store, 1)
        raw.plan = Switched(Fault(kind, place=place), operation=operation)
        if operation == "put":
            await put_one(store, 1)
        assert await read(store) is not OK
        raw.plan = Switched()
        await put_one(store)
        assert await read(store) is OK
