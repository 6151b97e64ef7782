"""Each rule of the backend contract finds a backend that breaks it."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.backends.base import ABSENT, Backend, Item, Usage
from kvkeep.backends.header import label
from kvkeep.testing.backend_contract import BackendContract
from kvkeep.testing.faulty_backend import FaultyBackend
from kvkeep.types import IoOutcome, Namespace, ObjectKey


class ZerosForAbsent(FaultyBackend):
    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        return [max(0, size) for size in await super().get(items)]


class LosesTheTail(FaultyBackend):
    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        outcomes = await super().put(items)
        for one in items:
            header, payload = self.objects[label(one.space), one.key]
            whole = len(payload) // 4096 * 4096
            cut = payload[:whole] + bytes(len(payload) - whole)
            self.objects[label(one.space), one.key] = header, cut
        return outcomes


class KeepsTheFirst(FaultyBackend):
    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        new = [one for one in items if (label(one.space), one.key) not in self.objects]
        await super().put(new)
        return [IoOutcome.OK] * len(items)


class TellsTheAskedLength(FaultyBackend):
    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        sizes = await super().get(items)
        return [
            size if size == ABSENT else one.length for one, size in zip(items, sizes, strict=True)
        ]


class AnswersBackwards(FaultyBackend):
    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        return list(await super().get(items))[::-1]


class AnswersNothingWithOne(FaultyBackend):
    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        return list(await super().get(items)) or [ABSENT]


class OneForAllGroups(FaultyBackend):
    def _one(self, items: Sequence[Item]) -> list[Item]:
        return [replace(one, key=one.key._replace(group=0)) for one in items]

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        return await super().get(self._one(items))

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        return await super().put(self._one(items))


class DeletesAllSalts(FaultyBackend):
    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        for other in (space, Namespace(space.fingerprint, "s"), Namespace(space.fingerprint)):
            await super().delete(other, keys, broken=broken)


class FindsBrokenOnes(FaultyBackend):
    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        if not broken:
            await super().delete(space, keys)


class ForgetsOneSalt(FaultyBackend):
    async def forget(self, space: Namespace) -> None:
        for name in [name for name in self.objects if name[0] == label(space)]:
            del self.objects[name]


class NamesTwice(FaultyBackend):
    async def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        for _ in range(2):
            async for name in super().names():
                yield name


class MixesWriters(FaultyBackend):
    """The header of one, the payload of the first."""

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        before = dict(self.objects)
        outcomes = await super().put(items)
        for name, (_, payload) in before.items():
            if len(payload) == len(self.objects[name][1]):
                self.objects[name] = self.objects[name][0], payload
        return outcomes


class SharesOneBuffer(FaultyBackend):
    def __init__(self) -> None:
        super().__init__()
        self.last: list[Item] = []

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        for one in self.last:
            one.payload[0] = 0
        self.last = list(items)
        return await super().get(items)


class ProbesAsAnObject(FaultyBackend):
    async def probe(self) -> None:
        name, stored = next(iter(self.objects.items()))
        self.objects["probe", name[1]] = stored


class CountsPuts(FaultyBackend):
    def usage(self) -> Usage:
        return Usage(objects=self.calls["put"])


class Escapes(FaultyBackend):
    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        for one in items:
            if one.space.model.startswith("../"):
                (self.place / ".." / ".." / "outside").write_bytes(one.header)
        return await super().put(items)


CASES: list[tuple[str, Callable[[], Backend]]] = [
    ("test_absent", ZerosForAbsent),
    ("test_round_trip", LosesTheTail),
    ("test_replace", KeepsTheFirst),
    ("test_other_length", TellsTheAskedLength),
    ("test_mixed_batch", AnswersBackwards),
    ("test_empty_batch", AnswersNothingWithOne),
    ("test_neighbours", OneForAllGroups),
    ("test_delete", DeletesAllSalts),
    ("test_delete_broken", FindsBrokenOnes),
    ("test_forget", ForgetsOneSalt),
    ("test_names", NamesTwice),
    ("test_concurrent", LosesTheTail),
    ("test_one_of_two_writers", MixesWriters),
    ("test_memory_is_left_alone", SharesOneBuffer),
    ("test_probe", ProbesAsAnObject),
    ("test_usage", CountsPuts),
    ("test_reopen", FaultyBackend),
]


@pytest.mark.parametrize(("rule", "broken"), CASES, ids=[rule for rule, _ in CASES])
def test_a_broken_backend_is_found(
    rule: str, broken: Callable[[], Backend], tmp_path: Path
) -> None:
    class Contract(BackendContract):
        async def make(self, place: Path) -> Backend:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Contract(), rule)(tmp_path)


def test_a_path_that_leaves_its_place_is_found(tmp_path: Path) -> None:
    class Contract(BackendContract):
        async def make(self, place: Path) -> Backend:
            place.mkdir()
            return Escapes(place)

    with pytest.raises(AssertionError):
        Contract().test_names_cannot_leave_the_place(tmp_path)


def test_every_rule_has_a_broken_backend() -> None:
    rules = {name for name in vars(BackendContract) if name.startswith("test_")}
    assert rules == {rule for rule, _ in CASES} | {"test_names_cannot_leave_the_place"}
