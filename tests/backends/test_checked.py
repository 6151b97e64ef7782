"""A store gives back what was put or says why not; what is broken is taken away and counted."""

import asyncio
import ctypes
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES, Item
from kvkeep.backends.checked import INLINE_BYTES, HeaderPages, Store, Wanted
from kvkeep.backends.guarded import GuardSettings, Late
from kvkeep.backends.header import label
from kvkeep.backends.registry import compose
from kvkeep.errors import BackendError
from kvkeep.testing import virtual_loop
from kvkeep.testing.backend_contract import OTHER, SALTED, SPACE, item, key, pattern
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Nth, Switched, flipped
from kvkeep.types import IoOutcome, Namespace

OK, CORRUPT, MISSING = IoOutcome.OK, IoOutcome.CORRUPT, IoOutcome.MISSING
MISMATCH, ERROR, REFUSED = IoOutcome.LAYOUT_MISMATCH, IoOutcome.ERROR, IoOutcome.REFUSED
LENGTH = 3 * PAGE_BYTES + 77
NAME = (label(SPACE), key(1))


async def inline(job: Callable[[], list[bytes]]) -> list[bytes]:
    return job()


def quiet(event: str, **fields: Any) -> None:
    """No log."""


def store_over(raw: FaultyBackend) -> Store:
    return compose(raw, settings=GuardSettings(), log=quiet, offload=inline)


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


async def outcome_of(store: Store, one: Wanted) -> IoOutcome:
    (outcome,) = await store.get([one])
    return outcome


async def has(store: Store, number: int = 1) -> bool:
    answer = store.contains(SPACE, [key(number)])
    (found,) = await answer if isinstance(answer, Awaitable) else answer
    return found


@pytest.mark.parametrize("length", [1, PAGE_BYTES, LENGTH, INLINE_BYTES + 1])
def test_round_trip(length: int) -> None:
    async def main() -> None:
        store = store_over(FaultyBackend())
        await store.open()
        await put_one(store, length=length)
        target = wanted(length=length)
        assert await outcome_of(store, target) is OK
        assert target.payload[:length] == pattern(1, length)
        assert [name async for name in store.names()] == [(*NAME, length)]
        await store.close()

    virtual_loop.run(main())


async def test_large_payloads_are_hashed_in_threads_by_default() -> None:
    store = compose(FaultyBackend(), settings=GuardSettings(), log=quiet)
    large = [wanted(n, length=INLINE_BYTES + n, seed=n) for n in range(1, 5)]
    assert list(await store.put(large)) == [OK] * 4
    targets = [wanted(n, length=INLINE_BYTES + n) for n in range(1, 5)]
    assert list(await store.get(targets)) == [OK] * 4
    assert [one.payload[: one.length] for one in targets] == [
        one.payload[: one.length] for one in large
    ]


async def test_every_object_of_a_batch_has_its_own_answer() -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    for number in (1, 2, 4):
        await put_one(store, number)
    header, payload = raw.objects[label(SPACE), key(2)]
    raw.objects[label(SPACE), key(2)] = header, flipped(payload, 99)
    targets = [wanted(n) for n in (1, 2, 3)] + [wanted(4, length=LENGTH + 1)]
    assert list(await store.get(targets)) == [OK, CORRUPT, MISSING, MISMATCH]
    assert targets[0].payload[:LENGTH] == pattern(1, LENGTH)
    assert {name for _, name in raw.objects} == {key(1)}
    assert store.status()["corrupt"] == {"payload_checksum": 1, "other_length": 1}


# ---- what is broken


async def broken_as(change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> tuple[IoOutcome, str]:
    """How a stored object is read that was changed like this; it must be gone then."""
    raw = FaultyBackend()
    store = store_over(raw)
    await put_one(store)
    return await read_changed(raw, store, change(*raw.objects[NAME]))


async def read_changed(
    raw: FaultyBackend, store: Store, changed: tuple[bytes, bytes]
) -> tuple[IoOutcome, str]:
    before = store.status()["corrupt"]
    raw.objects[NAME] = changed
    outcome = await outcome_of(store, wanted())
    assert NAME not in raw.objects
    assert raw.broken.pop() == (NAME, changed)
    after = store.status()["corrupt"]
    (reason,) = [word for word in after if after[word] == before.get(word, 0) + 1]
    assert sum(after.values()) == sum(before.values()) + 1
    return outcome, reason


@pytest.mark.slow
async def test_a_flip_in_any_byte_of_the_header() -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    await put_one(store)
    header, payload = raw.objects[NAME]
    bits = random.Random(1)
    for byte in range(HEADER_BYTES):
        changed = flipped(header, 8 * byte + bits.randrange(8)), payload
        reason = "bad_magic" if byte < 8 else "header_checksum"
        assert await read_changed(raw, store, changed) == (CORRUPT, reason), f"byte {byte}"
    assert await outcome_of(store, wanted()) is MISSING
    await put_one(store)
    assert await outcome_of(store, wanted()) is OK


async def test_a_flip_at_1000_places_of_the_payload() -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    await put_one(store)
    header, payload = raw.objects[NAME]
    places = random.Random(2).sample(range(8 * LENGTH), 998)
    for bit in [0, 8 * LENGTH - 1, *places]:
        found = await read_changed(raw, store, (header, flipped(payload, bit)))
        assert found == (CORRUPT, "payload_checksum"), f"bit {bit}"


async def test_cut_or_grown_to_any_length() -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    await put_one(store)
    header, payload = raw.objects[NAME]
    borders = [n * PAGE_BYTES + d for n in range(6) for d in (-1, 0, 1)]
    drawn = random.Random(3).sample(range(2 * LENGTH), 200)
    for size in {*borders, *drawn, 0, 1, LENGTH - 1, LENGTH + 1} - {LENGTH, -1}:
        changed = header, (payload + bytes(2 * LENGTH))[:size]
        reason = "truncated" if size < LENGTH else "too_long"
        assert await read_changed(raw, store, changed) == (CORRUPT, reason), f"{size} bytes"


async def test_a_file_cut_inside_its_header_is_told_as_size_0() -> None:
    found = await broken_as(lambda header, _: (header[:100].ljust(HEADER_BYTES, b"\0"), b""))
    assert found == (CORRUPT, "truncated")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (wanted(2, seed=2), (CORRUPT, "wrong_key")),
        (wanted(1, space=SALTED, seed=1), (CORRUPT, "wrong_key")),
        (wanted(1, space=OTHER, seed=1), (MISMATCH, "other_fingerprint")),
        (wanted(7, space=OTHER, length=9, seed=7), (MISMATCH, "other_fingerprint")),
        (wanted(1, length=LENGTH - 1, seed=1), (MISMATCH, "other_length")),
        (wanted(1, length=LENGTH + PAGE_BYTES, seed=1), (MISMATCH, "other_length")),
    ],
)
async def test_a_sound_object_of_another_kind_under_this_name(
    other: Wanted, expected: tuple[IoOutcome, str]
) -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    await store.put([other])
    (stranger,) = raw.objects.values()
    raw.objects.clear()
    assert await read_changed(raw, store, stranger) == expected


async def test_a_header_that_was_not_read_is_not_an_earlier_one() -> None:
    class Forgetful(FaultyBackend):
        async def get(self, items: Sequence[Item]) -> Sequence[int]:
            return [one.length for one in items]

    raw = Forgetful()
    store = store_over(raw)
    await put_one(store)  # its header page goes back and is the next one to be used
    target = wanted(seed=1)
    assert await outcome_of(store, target) is CORRUPT
    assert store.status()["corrupt"] == {"bad_magic": 1}


# ---- what does not work


async def test_an_error_is_an_outcome_and_its_text_is_kept() -> None:
    raw = FaultyBackend()
    store = store_over(raw)
    await put_one(store)
    raw.plan = Switched(Fault(Kind.ERROR))
    assert list(await store.get([wanted(), wanted(2)])) == [ERROR, ERROR]
    assert "get fails on demand" in store.status()["last_error"]
    assert list(await store.put([wanted(seed=1)])) == [ERROR]
    assert not await has(store)
    raw.plan = Switched()
    assert await outcome_of(store, wanted()) is OK  # so that the breaker stays closed
    raw.plan = Switched(Fault(Kind.ERROR))
    with pytest.raises(BackendError, match="delete fails on demand"):
        await store.delete(SPACE, [key(1)])
    with pytest.raises(BackendError, match="faulty://"):
        await store.forget(SPACE)
    raw.plan = Switched()
    assert await has(store)
    assert await outcome_of(store, wanted()) is OK


async def test_an_open_breaker_refuses_and_sends_nothing() -> None:
    raw = FaultyBackend(plan=Switched(Fault(Kind.ERROR)))
    store = store_over(raw)
    for _ in range(5):
        await store.get([wanted()])
    sent = raw.calls.copy()
    assert list(await store.get([wanted(), wanted(2)])) == [REFUSED, REFUSED]
    assert list(await store.put([wanted(seed=1)])) == [REFUSED]
    assert not await has(store)
    assert raw.calls == sent
    status = store.status()
    assert status["state"] == "open"
    assert "get fails on demand" in status["why"]
    assert status["failures_in_row"] == 5
    assert 0 < status["retry_in_s"] <= 5
    assert status["operations"]["get"]["outcomes"] == {"error": 5, "refused": 2}
    assert status["operations"]["put"]["outcomes"] == {"refused": 1}
    await store.close()


async def test_a_refused_put_is_not_hashed() -> None:
    hashed: list[int] = []

    async def counted(job: Callable[[], list[bytes]]) -> list[bytes]:
        hashed.append(1)
        return job()

    raw = FaultyBackend(plan=Switched(Fault(Kind.ERROR)))
    store = compose(raw, settings=GuardSettings(), log=quiet, offload=counted)
    large = wanted(length=INLINE_BYTES + 1, seed=1)
    outcomes = [list(await store.put([large])) for _ in range(7)]
    assert outcomes == [[ERROR]] * 5 + [[REFUSED]] * 2
    assert len(hashed) == 5
    await store.close()


def test_contains_is_false_when_the_answer_is_an_error_or_late() -> None:
    async def main() -> None:
        raw = FaultyBackend(later=True)
        store = store_over(raw)
        await put_one(store)
        for fault in (Fault(Kind.ERROR), Fault(Kind.SLOW, delay_s=9.0), None):
            raw.plan = Switched(fault, operation="contains")
            answer = store.contains(SPACE, [key(1), key(2)])
            assert isinstance(answer, Awaitable)
            assert list(await answer) == [fault is None, False]
        contains = store.status()["operations"]["contains"]
        assert contains["outcomes"] == {"error": 2, "found": 1, "missing": 1, "timeout": 2}
        assert contains["seconds"]["count"] == 3

    virtual_loop.run(main())


async def test_another_number_of_answers_is_an_error() -> None:
    class Talkative(FaultyBackend):
        async def get(self, items: Sequence[Item]) -> Sequence[int]:
            return [*await super().get(items), 5]

    store = store_over(Talkative())
    await put_one(store)
    assert await outcome_of(store, wanted()) is ERROR
    assert "2 answers for 1" in store.status()["last_error"]


class Recording(FaultyBackend):
    """Notes where the header pages of each call are."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[set[int]] = []

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        self.pages.append({address(one.header) for one in items})
        return await super().get(items)

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        self.pages.append({address(one.header) for one in items})
        return await super().put(items)


def address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_late_call_keeps_its_pages_until_it_has_settled(operation: str) -> None:
    async def main() -> None:
        raw = Recording()
        store = store_over(raw)
        raw.plan = Nth(1, Fault(Kind.NEVER), operation=operation)
        one = wanted(seed=1)
        with pytest.raises(Late, match=operation) as late:
            await (store.get([one]) if operation == "get" else store.put([one]))
        assert not late.value.settled.done()
        assert store.status()["stuck"] == 1
        many = [wanted(n) for n in range(2, 100)]
        await store.get(many)
        raw.unstick()
        await late.value.settled
        assert store.status()["stuck"] == 0
        await store.get(many)
        held, meanwhile, after = raw.pages
        assert not held & meanwhile
        assert held <= after

    virtual_loop.run(main())


def test_header_pages_are_pages_and_never_shared() -> None:
    pages = HeaderPages()
    taken = [pages.take() for _ in range(200)]
    places = {address(page) for page in taken}
    assert len(places) == 200
    assert all(place % PAGE_BYTES == 0 for place in places)
    assert all(len(page) == HEADER_BYTES for page in taken)


def test_a_removal_that_hangs_does_not_hold_up_the_reader() -> None:
    async def main() -> None:
        raw = FaultyBackend(plan=Switched(Fault(Kind.NEVER), operation="delete"))
        store = store_over(raw)
        await put_one(store)
        header, payload = raw.objects[NAME]
        raw.objects[NAME] = header, flipped(payload, 5)
        assert await outcome_of(store, wanted()) is CORRUPT
        assert asyncio.get_running_loop().time() < 1.0
        raw.plan = Switched()
        raw.unstick()
        await store.close()
        assert NAME not in raw.objects

    virtual_loop.run(main())


# ---- the nth call fails, once and for ever


async def scripted(store: Store) -> list[IoOutcome]:
    """A small workload; whatever fails, an OK must have the right bytes."""
    seen: list[IoOutcome] = []
    for turn in range(2):
        for number in range(1, 4):
            seen += await finished(store.put, wanted(number, seed=number))
            target = wanted(number)
            got = await finished(store.get, target)
            if got == [OK]:
                assert target.payload[:LENGTH] == pattern(number, LENGTH)
            seen += got
            await has(store, number)
        await asyncio.sleep(100.0 * turn)  # a breaker that opened may close
    return seen


async def finished(
    call: Callable[[Sequence[Wanted]], Awaitable[Sequence[IoOutcome]]], one: Wanted
) -> list[IoOutcome]:
    try:
        return list(await call([one]))
    except Late:
        return [IoOutcome.TIMEOUT]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.SLOW])
@pytest.mark.parametrize("for_ever", [False, True])
def test_the_nth_call_fails(kind: Kind, *, for_ever: bool) -> None:
    async def main(n: int) -> bool:
        plan = Nth(n, Fault(kind, place=n), for_ever=for_ever)
        raw = FaultyBackend(plan)
        store = store_over(raw)
        outcomes = await scripted(store)
        assert for_ever or sum(outcome is not OK for outcome in outcomes) <= 2
        raw.plan = Switched()
        raw.unstick()
        await asyncio.sleep(100.0)
        await put_one(store)
        assert await outcome_of(store, wanted()) is OK
        return plan.seen >= n

    n = 1
    while virtual_loop.run(main(n)):
        n += 1
    assert n > 12


# ---- what is counted


def test_status_counts_operations_bytes_and_seconds() -> None:
    async def main() -> None:
        raw = FaultyBackend(capacity_bytes=50_000)
        store = store_over(raw)
        await put_one(store, 1)
        await put_one(store, 2)
        full = [wanted(n, seed=n) for n in range(3, 6)]
        assert list(await store.put(full)) == [OK, IoOutcome.FULL, IoOutcome.FULL]
        raw.plan = Switched(Fault(Kind.SLOW, delay_s=0.2))
        assert list(await store.get([wanted(1), wanted(9)])) == [OK, MISSING]
        status = store.status()
        assert status["objects"] == 3
        assert status["used_bytes"] == 3 * (LENGTH + HEADER_BYTES)
        assert status["capacity_bytes"] == 50_000
        assert (status["state"], status["why"], status["stuck"]) == ("closed", "", 0)
        operations = status["operations"]
        assert operations["put"]["outcomes"] == {"full": 2, "ok": 3}
        assert operations["put"]["bytes"] == 3 * LENGTH
        assert operations["get"]["outcomes"] == {"missing": 1, "ok": 1}
        assert operations["get"]["bytes"] == LENGTH
        seconds = operations["get"]["seconds"]
        assert (seconds["count"], seconds["buckets"]["0.1"], seconds["buckets"]["0.3"]) == (1, 0, 1)
        assert seconds["sum_s"] == pytest.approx(0.2)

    virtual_loop.run(main())
