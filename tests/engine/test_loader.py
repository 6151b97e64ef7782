"""Loads beside the engine, without an engine: order, cancelling, lost threads, streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.engine.worker_parts import EPOCH, MIB, Parts

pytestmark = pytest.mark.engine


def load(name: str, *chunks: tuple[int, list[int | None]], slot: int = 3) -> Any:
    """One request's load: (offset, blocks) per chunk, all under one slot."""
    from kvkeep.connectors.vllm.meta import Load

    return Load(name, EPOCH, [[(slot, o, 0) for o, _ in chunks]], [blocks for _, blocks in chunks])


def step(*loads: Any, tokens: int = 5) -> Any:
    from kvkeep.connectors.vllm.meta import StepMeta

    return StepMeta(1, list(loads), [], tokens)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is a long one."""
    from kvkeep.connectors.vllm import worker_side

    monkeypatch.setattr(worker_side, "INLINE_S", -1.0)


@contextmanager
def gate(parts: Parts) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The loader's first copy says that it is reached, and waits to be let through."""
    reached, let = threading.Event(), threading.Event()
    real = parts.side.blocks.scatter

    def scatter(jobs: Any) -> int:
        if threading.current_thread().name == "kvkeep-loader":
            reached.set()
            assert let.wait(30)
        return real(jobs)

    parts.side.blocks.scatter = scatter  # type: ignore[method-assign]
    try:
        yield reached, let
    finally:
        let.set()


def received(parts: Parts, want: set[str]) -> None:
    """Until all of these have been reported."""
    got: set[str] = set()
    for _ in range(30_000):
        got |= parts.side.take_received(nothing_to_compute=True)
        if got >= want:
            assert got == want
            return
    raise AssertionError(f"only {got} was received")


def fill(parts: Parts, offset: int, byte: int) -> None:
    import ctypes

    ctypes.memset(parts.mapping.address + offset, byte, 8192)


def test_a_short_load_is_reported_in_its_step(parts: Parts) -> None:
    parts.side.load(step(load("r", (0, [4, 5]))))
    assert parts.side.take_received() == {"r"}
    assert not parts.side.take_report(1).loads["r"].beside


def test_with_nothing_to_compute_the_first_load_is_copied_at_once(parts: Parts, slow: None) -> None:
    with gate(parts):
        parts.side.load(step(load("r", (0, [4, 5])), load("s", (0, [6, 7])), tokens=0))
        assert parts.side.take_received() == {"r"}
    received(parts, {"s"})
    report = parts.side.take_report(1)
    assert (report.loads["r"].beside, report.loads["s"].beside) == (False, True)


def test_a_long_load_is_reported_when_it_is_done(parts: Parts, slow: None) -> None:
    fill(parts, 0, 7)
    with gate(parts) as (reached, let):
        parts.side.load(step(load("r", (0, [4, 5]))))
        parts.side.fail_unreported_loads(step(load("r", (0, [4, 5]))))
        assert reached.wait(30)
        assert parts.side.take_received() == set()
        assert not parts.mapping.close(0.01)  # it stays mapped for the copy
        let.set()
    received(parts, {"r"})
    report = parts.side.take_report(1).loads["r"]
    assert (report.broken, report.stale, report.beside) == (set(), set(), True)
    assert parts.storage[:, 4:6].contiguous().numpy().tobytes() == bytes([7]) * 8192


def test_what_changes_under_a_long_load_is_stale_from_there_on(parts: Parts, slow: None) -> None:
    with gate(parts) as (reached, let):
        chunks = [(0, [1, 2]), (MIB, [3, 4]), (2 * MIB, [5, 6])]
        job = load("r", *chunks)  # type: ignore[arg-type]
        job.handles[0][1] = (4, MIB, 0)
        parts.side.load(step(job))
        assert reached.wait(30)
        parts.table.words[4] = 1  # taken back in the middle
        let.set()
    received(parts, {"r"})
    assert parts.side.take_report(1).loads["r"].stale == {1, 2}
    assert parts.side.take_bad_blocks() == {3, 4, 5, 6}


def test_an_aborted_load_skips_what_has_not_begun(parts: Parts, slow: None) -> None:
    with gate(parts) as (reached, let):
        parts.side.load(step(load("r", (0, [1, 2]), (MIB, [3, 4])), load("s", (0, [5, 6]))))
        assert reached.wait(30)
        assert parts.side.take_received({"r", "s"}) == set()
        let.set()
    received(parts, {"r", "s"})
    report = parts.side.take_report(1)
    assert report.loads["r"].stale == {1}
    assert report.loads["s"].stale == {0}
    assert bool((parts.storage[:, 3:7] == parts.pool[:, 3:7]).all())


def test_blocks_given_to_others_are_waited_for(parts: Parts, slow: None) -> None:
    with gate(parts) as (reached, let):
        parts.side.load(step(load("r", (0, [1, 2]), (MIB, [3, 4]))))
        assert reached.wait(30)
        stopping = threading.Thread(target=lambda: parts.side.stop_loading({"r"}))
        stopping.start()
        stopping.join(0.05)
        assert stopping.is_alive()  # one chunk is in progress
        let.set()
        stopping.join(30)
        assert not stopping.is_alive()
    assert bool((parts.storage[:, 3:5] == parts.pool[:, 3:5]).all())
    received(parts, {"r"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_fails_its_loads_and_hangs_nobody(parts: Parts, slow: None) -> None:
    def explode(_: Any) -> int:
        raise AssertionError("planted")

    parts.side.blocks.scatter = explode  # type: ignore[assignment]
    parts.side.load(step(load("r", (0, [1, 2])), load("s", (0, [5, 6]))))
    received(parts, {"r", "s"})
    report = parts.side.take_report(1)
    assert report.loads["r"].stale == report.loads["s"].stale == {0}
    parts.side.load(step(load("t", (0, [1, 2]))))
    received(parts, {"t"})


def test_closing_ends_the_thread_and_the_copies(parts: Parts, slow: None) -> None:
    with gate(parts) as (reached, let):
        parts.side.load(step(load("r", (0, [1, 2]), (MIB, [3, 4])), load("s", (0, [5, 6]))))
        assert reached.wait(30)
        closing = threading.Thread(target=parts.side.loader.close)
        closing.start()
        let.set()
        closing.join(30)
        assert not closing.is_alive()
    assert "kvkeep-loader" not in [thread.name for thread in threading.enumerate()]


# ---- a device's stream, with a mark that the test passes


class Mark:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Streamed:
    """A StreamLoader on host blocks whose marks are the test's."""

    def __init__(self, parts: Parts) -> None:
        from kvkeep.connectors.vllm.loader import StreamLoader

        self.marks: list[Mark] = []
        self.loader = StreamLoader(parts.side.blocks)
        self.loader._blocks.mark = self._mark  # type: ignore[method-assign]
        self.mapping = parts.mapping

    def _mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def submit(self, job: Any) -> Any:
        from kvkeep.connectors.vllm.loader import Task

        task = Task(job, job.handles[0], self.mapping, beside=True)
        self.loader.submit(task)
        return task


def test_a_stream_is_asked_and_holds_the_mapping(parts: Parts) -> None:
    streamed = Streamed(parts)
    first = streamed.submit(load("r", (0, [1, 2]), (MIB, [3, 4])))
    second = streamed.submit(load("s", (0, [5, 6]), slot=5))
    assert streamed.loader.take_ended(0.001) == []
    assert not parts.mapping.close(0.01)
    streamed.marks[0].passed = True
    assert streamed.loader.take_ended() == [first]
    assert (first.stale, first.broken) == (set(), set())
    parts.table.words[5] = 1  # taken back before the copy was done
    streamed.loader.wait_for({"other"})
    assert streamed.loader.take_ended() == []
    streamed.loader.wait_for({"s"})
    assert streamed.loader.take_ended() == [second]
    assert second.stale == {0}
    assert parts.mapping.close()


def test_what_a_stream_cannot_begin_ends_as_failed(parts: Parts) -> None:
    streamed = Streamed(parts)
    outside = streamed.submit(load("r", (0, [1, 99])))
    assert streamed.loader.take_ended() == [outside]
    assert outside.broken == {0}
    assert parts.mapping.close()
    late = streamed.submit(load("s", (0, [1, 2])))
    assert streamed.loader.take_ended() == [late]
    assert late.stale == {0}


def test_closing_a_stream_waits_for_it(parts: Parts) -> None:
    streamed = Streamed(parts)
    task = streamed.submit(load("r", (0, [1, 2])))
    streamed.loader.close()
    assert streamed.loader.take_ended() == [task]
    assert parts.mapping.close()
