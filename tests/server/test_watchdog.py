"""The loop's watchdog: what it counts, what it says, and that the service has it in its status."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.core.directory import Directory
from kvkeep.metrics import exposition
from kvkeep.server.service import Service
from kvkeep.server.watchdog import BOUNDS_S, LOG_EVERY_S, LONG_S, Beat, Watchdog
from kvkeep.types import Epoch


class Clock:
    """Goes on only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watch:
    """A watchdog with clocks and lines."""

    def __init__(self) -> None:
        self.wall, self.cpu = Clock(), Clock()
        self.lines: list[dict[str, object]] = []
        self.dog = Watchdog(self.log, clock=self.wall, cpu_clock=self.cpu)

    def log(self, event: str, **fields: object) -> None:
        self.lines.append({"event": event, **fields})

    def spend(self, what: str, wall_s: float, cpu_s: float = 0.0) -> None:
        with self.dog.entry(what):
            self.wall.now_s += wall_s
            self.cpu.now_s += cpu_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_the_longest_entry_is_remembered_with_its_kind(watch: Watch) -> None:
    for what, wall_s, cpu_s in (
        ("tick", 0.001, 0.001),
        ("sweep", 0.03, 0.002),
        ("io", 0.004, 0.003),
    ):
        watch.spend(what, wall_s, cpu_s)
    watch.spend("sweep", 0.0005)
    status = watch.dog.status()
    assert (status["longest_ms"], status["longest_what"]) == (30.0, "sweep")
    assert status["longest_cpu_ms"] == 3.0
    assert status["entries"]["sweep"] == {
        "count": 2,
        "sum_ms": 30.5,
        "longest_ms": 30.0,
        "longest_cpu_ms": 2.0,
    }


@pytest.mark.parametrize("bound", range(len(BOUNDS_S)))
def test_each_entry_is_in_one_bucket(watch: Watch, bound: int) -> None:
    watch.spend("tick", BOUNDS_S[bound] * 0.9)
    watch.spend("tick", BOUNDS_S[bound] * 1.05)
    buckets = watch.dog.seen["tick"].buckets
    assert [i for i, count in enumerate(buckets) if count] == [bound, bound + 1]


def test_an_entry_within_another_counts_as_that_one(watch: Watch) -> None:
    with watch.dog.entry("frames"):
        watch.spend("io", 0.002)
        watch.spend("status", 0.002)
    assert list(watch.dog.seen) == ["frames"]
    assert watch.dog.seen["frames"].sum_s == pytest.approx(0.004)


def test_an_entry_ends_with_an_error_too(watch: Watch) -> None:
    with pytest.raises(ZeroDivisionError), watch.dog.entry("tick"):
        watch.wall.now_s += 1 / 0
    watch.spend("io", 0.001)
    assert watch.dog.seen["io"].count == watch.dog.seen["tick"].count == 1


def test_a_long_entry_is_said_once_a_minute(watch: Watch) -> None:
    watch.spend("tick", LONG_S * 0.99)
    assert not watch.lines
    for _ in range(3):
        watch.spend("sweep", 2 * LONG_S)
    watch.wall.now_s += LOG_EVERY_S
    watch.spend("tick", 3 * LONG_S)
    assert [(line["by"], line["took_ms"], line["times"]) for line in watch.lines] == [
        ("sweep", 100.0, 1),
        ("tick", 150.0, 3),
    ]


def test_without_a_cpu_clock_it_says_nothing_of_cpu() -> None:
    dog = Watchdog()
    with dog.entry("tick"):
        pass
    status = dog.status()
    assert status["longest_cpu_ms"] is None
    assert status["entries"]["tick"]["longest_cpu_ms"] is None


async def test_the_beat_notices_a_held_loop() -> None:
    dog, loop = Watchdog(), asyncio.get_running_loop()
    due: list[float] = []

    class Slow:
        """A loop whose timer rings late."""

        now_s = 7.0

        def time(self) -> float:
            return self.now_s

        def call_at(self, at_s: float, action: object) -> asyncio.TimerHandle:
            due.append(at_s)
            return loop.call_later(3600.0, print, action)

    slow = Slow()
    beat = Beat(dog, slow)
    slow.now_s = due[0] + 0.25
    beat._ring()
    slow.now_s = due[1]
    beat._ring()
    beat.stop()
    assert dog.longest_lag_s == pytest.approx(0.25)
    assert len(due) == 3


def test_the_service_shows_it_in_status_and_metrics(watch: Watch) -> None:
    service = Service(
        Directory([0] * 8, iter(range(1, 99)).__next__),
        epoch=Epoch(1),
        capacity_bytes=4096,
        clock=watch.wall,
        log=watch.log,
        watchdog=watch.dog,
    )
    watch.spend("tick", 0.003)
    service.status()
    assert service.status()["loop"]["longest_what"] == "tick"
    families = {f.name: f for f in text_string_to_metric_families(exposition(service).decode())}
    samples = families["kvkeep_loop_busy_seconds"].samples
    ticks = [
        (s.labels["le"], s.value)
        for s in samples
        if s.labels["what"] == "tick" and s.name.endswith("_bucket")
    ]
    assert ticks == [(str(b), float(b >= 0.005)) for b in BOUNDS_S] + [("+Inf", 1.0)]
    assert watch.dog.seen["metrics"].count == 1
