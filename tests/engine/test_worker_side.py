"""The worker side copies only what is still its own: real shared memory, real blocks, no server."""

from typing import Any

import pytest
from tests.engine.worker_parts import EPOCH, MIB, Parts

pytestmark = pytest.mark.engine


def stage(number: int, *, offset: int, generation: int, epoch: int = EPOCH) -> Any:
    from kvkeep.connectors.vllm.meta import StageCopy

    return StageCopy(number, epoch, [(3, offset, generation)], [1, 2])


def test_a_staged_chunk_is_written_under_its_generation(parts: Parts) -> None:
    from kvkeep.connectors.vllm.meta import StepMeta

    parts.table.words[3] = 5
    parts.side.save(StepMeta(1, [], [stage(1, offset=0, generation=5)]))
    report = parts.side.take_report(1)
    assert report.copied == {1: 1}
    assert report.failed == set()
    want = parts.pool[:, 1:3].contiguous().numpy().tobytes()
    assert parts.bytes_at(0, len(want)) == want


def test_an_extent_that_was_given_back_is_not_written(parts: Parts) -> None:
    """The connection was lost and found again between the grant and the copy."""
    from kvkeep.connectors.vllm.meta import StepMeta

    parts.table.words[3] = 6
    stages = [stage(1, offset=0, generation=5), stage(2, offset=MIB, generation=6)]
    parts.side.save(StepMeta(1, [], stages))
    report = parts.side.take_report(1)
    assert report.copied == {1: 1, 2: 1}
    assert report.failed == {1}
    assert parts.bytes_at(0, 8192) == bytes(8192)
    assert parts.bytes_at(MIB, 8192) != bytes(8192)


def test_handles_of_another_epoch_are_refused(parts: Parts) -> None:
    from kvkeep.connectors.vllm.meta import Load, StepMeta

    load = Load("r", EPOCH + 1, [[(3, 0, 0)]], [[4, 5]])
    meta = StepMeta(1, [load], [stage(1, offset=0, generation=0, epoch=EPOCH + 1)])
    parts.side.load(meta)
    parts.side.save(meta)
    report = parts.side.take_report(1)
    assert report.failed == {1}
    assert report.loads["r"].stale == {0}
    assert parts.side.take_bad_blocks() == {4, 5}
    assert parts.side.take_received() == {"r"}
    assert parts.bytes_at(0, 8192) == bytes(8192)
    assert bool((parts.storage == parts.pool).all())


def test_a_read_that_was_overtaken_is_a_failed_load(parts: Parts) -> None:
    from kvkeep.connectors.vllm.meta import Load, StepMeta

    parts.table.words[3], parts.table.words[4] = 1, 9
    load = Load("r", EPOCH, [[(3, 0, 1), (4, MIB, 8)]], [[4, 5], [6, 7]])
    parts.side.load(StepMeta(1, [load], []))
    report = parts.side.take_report(1)
    assert report.loads["r"].stale == {1}
    assert parts.side.take_bad_blocks() == {6, 7}


def test_without_an_arena_everything_fails_and_nothing_raises(parts: Parts) -> None:
    from kvkeep.connectors.vllm.meta import Load, StepMeta

    parts.side.client.mapping = None
    load = Load("r", EPOCH, [[(3, 0, 0)]], [[None, 5]])
    meta = StepMeta(1, [load], [stage(1, offset=0, generation=0)])
    parts.side.load(meta)
    parts.side.save(meta)
    report = parts.side.take_report(1)
    assert report.failed == {1}
    assert parts.side.take_bad_blocks() == {5}
