"""`fs` keeps every tenant to its limit: its own oldest go, others lose nothing, also restarted."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.fs_cases import DISK_BYTES, LENGTH, settings

from kvkeep.backends import fs_quota
from kvkeep.backends.base import TenantUsage
from kvkeep.backends.fs import FsBackend
from kvkeep.backends.fs_index import Entry, Index
from kvkeep.backends.header import label
from kvkeep.errors import BackendError
from kvkeep.testing.backend_contract import OTHER, SPACE, filled, found, item, key, ready, until
from kvkeep.types import IoOutcome, Namespace

FULL, OK = IoOutcome.FULL, IoOutcome.OK
HOME = label(SPACE)


@dataclass
class Limits:
    """In objects, by salt; without an entry: no limit."""

    objects: dict[str | None, int] = field(default_factory=dict)

    def limit_bytes(self, digest: str, capacity_bytes: int) -> int | None:
        for salt, objects in self.objects.items():
            if digest_of(salt) == digest:
                return objects * DISK_BYTES
        return None


def space(salt: str | None) -> Namespace:
    return msgspec.structs.replace(SPACE, salt=salt)


def digest_of(salt: str | None) -> str:
    return label(space(salt))[len(HOME) + 1 :]


@asynccontextmanager
async def opened(
    root: Path, limits: Limits, capacity_bytes: int = 64 << 20
) -> AsyncIterator[FsBackend]:
    ticks = count(1)
    backend = FsBackend(settings(root, capacity_bytes), clock=lambda: next(ticks) * 10**12)
    backend.limit_tenants(limits)
    await backend.open()
    try:
        await ready(backend)
        yield backend
    finally:
        await backend.close()


async def put(backend: FsBackend, salt: str | None, *numbers: int) -> list[IoOutcome]:
    """One after the other."""
    outcomes: list[IoOutcome] = []
    for number in numbers:
        outcomes += await backend.put([filled(space(salt), key(number), LENGTH, seed=number)])
    return outcomes


async def there(backend: FsBackend, salt: str | None, most: int = 20) -> list[int]:
    held = await found(backend, space(salt), [key(number) for number in range(most)])
    return [number for number, is_there in enumerate(held) if is_there]


def usage(backend: FsBackend, salt: str | None) -> TenantUsage:
    digest = digest_of(salt)
    return next((u for u in backend.tenants() if u.digest == digest), TenantUsage(digest, 0))


async def test_at_its_limit_a_tenant_loses_its_own_oldest(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 3})) as backend:
        assert await put(backend, "b", 0, 1) == [OK] * 2  # older than everything of "a"
        assert await put(backend, None, 0) == [OK]
        assert await put(backend, "a", *range(6)) == [OK] * 6
        assert await there(backend, "a") == [3, 4, 5]
        assert await there(backend, "b") == [0, 1]
        assert await there(backend, None) == [0]
        assert usage(backend, "a") == TenantUsage(digest_of("a"), 3 * DISK_BYTES, 0, 3)
        assert usage(backend, None) == TenantUsage("", DISK_BYTES)


async def test_all_fingerprints_of_a_salt_count_together(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 2})) as backend:
        await put(backend, "a", 0)
        other = msgspec.structs.replace(OTHER, salt="a")
        for number in (1, 2):
            assert await backend.put([filled(other, key(number), LENGTH)]) == [OK]
        assert await there(backend, "a") == []
        assert await found(backend, other, [key(1), key(2)]) == [True, True]


async def test_a_restart_counts_again(tmp_path: Path) -> None:
    limits = Limits({"a": 3})
    async with opened(tmp_path, limits) as backend:
        await put(backend, "a", 0, 1, 2)
        await put(backend, "b", 0)
    async with opened(tmp_path, limits) as backend:
        assert usage(backend, "a").used_bytes == 3 * DISK_BYTES
        assert await put(backend, "a", 3) == [OK]
        assert await there(backend, "a") == [1, 2, 3]
        assert await there(backend, "b") == [0]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_lower_limit_is_reached_by_and_by(
    tmp_path: Path, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_quota, "MOST_AT_ONCE", 3)
    limits = Limits()
    async with opened(tmp_path, limits) as backend:
        await put(backend, "a", *range(10))
        if not restarts:
            limits.objects["a"] = 2
            assert await put(backend, "a", 10) == [OK]
            assert await there(backend, "a") == [3, 4, 5, 6, 7, 8, 9, 10]  # three at most, for one
            assert await put(backend, "a", 11, 12, 13) == [OK] * 3
            assert await there(backend, "a") == [12, 13]
    limits.objects["a"] = 2
    if restarts:
        async with opened(tmp_path, limits) as backend:
            assert usage(backend, "a").used_bytes == 10 * DISK_BYTES
            assert await put(backend, "a", *range(10, 15)) == [OK] * 5
            assert usage(backend, "a").used_bytes == 2 * DISK_BYTES


async def test_what_can_never_fit_evicts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_quota, "MOST_AT_ONCE", 1)
    limits = Limits()
    async with opened(tmp_path, limits) as backend:
        await put(backend, "a", *range(3))
        limits.objects["a"] = 0
        assert await put(backend, "a", 3) == [FULL]
        assert await there(backend, "a") == [0, 1, 2]


async def test_what_can_never_fit_is_full_for_that_tenant_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 0})) as backend:
        assert await put(backend, "a", 0, 1) == [FULL, FULL]
        assert await put(backend, "b", 0) == [OK]
        assert usage(backend, "a") == TenantUsage(digest_of("a"), 0, refused_objects=2)
        assert backend.refused_puts() == {digest_of("a"): 2}
        assert backend.usage().used_bytes == DISK_BYTES
        mixed = [filled(space(salt), key(9), LENGTH) for salt in ("a", "b", "a", None)]
        assert await backend.put(mixed) == [FULL, OK, FULL, OK]


async def test_what_is_being_read_stays(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 1})) as backend:
        await put(backend, "a", 0)
        entry = backend._open_held().index.find(label(space("a")), key(0))
        assert entry is not None
        entry.busy += 1
        assert await put(backend, "a", 1) == [FULL]
        assert await there(backend, "a") == [0]
        entry.busy -= 1
        assert await put(backend, "a", 1) == [OK]
        assert await there(backend, "a") == [1]


async def test_many_at_once_wait_for_each_other(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 2})) as backend:
        items = [filled(space("a"), key(number), LENGTH, seed=number) for number in range(12)]
        items += [filled(space("b"), key(number), LENGTH, seed=number) for number in range(12)]
        assert await backend.put(items) == [OK] * 24
        assert len(await there(backend, "a")) == 2
        assert len(await there(backend, "b")) == 12


async def test_a_store_that_fails_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, Limits({"a": 1})) as backend:

        def broken(*_: object, **__: object) -> None:
            raise OSError(5, "planted")

        monkeypatch.setattr(backend._files, "write", broken)
        for _ in range(3):
            with pytest.raises(OSError, match="planted"):
                await put(backend, "a", 0)
        monkeypatch.undo()
        assert usage(backend, "a").used_bytes == 0
        assert await put(backend, "a", 0) == [OK]


async def test_one_that_waits_may_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, Limits({"a": 1})) as backend:
        held, goes_on = backend._open_held(), asyncio.Event()
        run = held.pools.writers.run

        async def slow(work: object) -> object:
            await goes_on.wait()
            return await run(work)  # type: ignore[arg-type]

        monkeypatch.setattr(held.pools.writers, "run", slow)
        first = asyncio.create_task(put(backend, "a", 0))
        await until(lambda: usage(backend, "a").used_bytes == DISK_BYTES)
        second = asyncio.create_task(put(backend, "a", 1))
        third = asyncio.create_task(put(backend, "a", 2))
        await until(lambda: len(held.tenants._waiting.get(digest_of("a"), ())) == 2)
        second.cancel()
        goes_on.set()
        assert await first == [OK]
        assert await third == [OK]
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await there(backend, "a") == [2]
        assert usage(backend, "a").used_bytes == DISK_BYTES


async def test_forgetting_and_deleting_give_room(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits({"a": 2})) as backend:
        await put(backend, "a", 0, 1)
        await backend.delete(space("a"), [key(0)])
        await put(backend, "a", 2)
        assert await there(backend, "a") == [1, 2]
        other = msgspec.structs.replace(OTHER, salt="a")
        assert await backend.put([filled(other, key(1), LENGTH)]) == [OK]
        await backend.forget(space(None))
        assert usage(backend, "a").used_bytes == DISK_BYTES
        await backend.forget(other)
        assert usage(backend, "a").used_bytes == 0
        assert await put(backend, "a", 3, 4) == [OK, OK]
        assert await there(backend, "a") == [3, 4]


async def test_counts_are_kept_for_so_many_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_quota, "MOST_COUNTED", 2)
    limits = Limits({f"t{n}": 0 for n in range(5)})
    async with opened(tmp_path, limits) as backend:
        for n in (0, 1, 2, 3, 4, 0):
            assert await put(backend, f"t{n}", 0) == [FULL]
        counts = {digest_of("t0"): 2, digest_of("t1"): 1, fs_quota.OTHERS: 3}
        assert backend.refused_puts() == counts


async def test_before_it_is_open_there_is_nobody(tmp_path: Path) -> None:
    backend = FsBackend(settings(tmp_path))
    assert (list(backend.tenants()), dict(backend.refused_puts())) == ([], {})
    with pytest.raises(BackendError, match="not open"):
        await backend.get([item(SPACE, key(0), LENGTH)])


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_stores_keeps_every_limit(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    salts: list[str | None] = [None, "a", "b", "c"]
    limits = Limits({"a": 3, "b": 5})
    async with opened(tmp_path, limits) as backend:
        stored: dict[str | None, set[int]] = {salt: set() for salt in salts}
        for _ in range(12):
            salt = rng.choice(salts)
            numbers = [rng.randrange(16) for _ in range(rng.randint(1, 6))]
            items = [filled(space(salt), key(n), LENGTH, seed=n) for n in numbers]
            assert await backend.put(items) == [OK] * len(items)
            stored[salt].update(numbers)
            for one in salts:
                objects = await there(backend, one)
                assert usage(backend, one).used_bytes == len(objects) * DISK_BYTES
                assert len(objects) <= limits.objects.get(one, 99)
                assert one in limits.objects or set(objects) == stored[one]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 30), st.sampled_from(["add", "use", "go"])
        ),
        max_size=60,
    ),
    st.sets(st.integers(0, 30), max_size=6),
)
def test_the_least_of_all_and_of_each_tenant(
    steps: Sequence[tuple[str, int, str]], busy: set[int]
) -> None:
    index, entries = Index(), dict[tuple[str, int], Entry]()

    def is_busy(entry: Entry) -> bool:
        return entry.size in busy

    def worth(digest: str | None = None) -> list[int]:
        able = [e for (d, _), e in entries.items() if digest in (None, d) and not is_busy(e)]
        return [e.value_ns for e in able]

    clock = count(1000)
    for digest, number, what in steps:
        name = digest, number
        if what == "add" and name not in entries:
            label_ = f"{'0' * 32}-{digest}"
            value = (number * 7919) % 101  # also below what is there
            entries[name] = index.add(label_, key(number), number, value)
        elif what == "use" and name in entries:
            index.use(entries[name], next(clock), 0)
        elif what == "go" and name in entries:
            index.drop(entries.pop(name))
        least = index.least(is_busy)
        assert (least.value_ns if least else None) == min(worth(), default=None)
        for each in "abc":
            tenant = index.tenants.get(each)
            one = tenant.least(is_busy) if tenant else None
            assert (one.value_ns if one else None) == min(worth(each), default=None)
            mine = [e for (d, _), e in entries.items() if d == each]
            assert (tenant.bytes if tenant else 0) == sum(e.disk_bytes for e in mine)
            assert (tenant.objects if tenant else 0) == len(mine)
