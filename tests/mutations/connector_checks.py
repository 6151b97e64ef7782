"""Checks of the connector's two sides without engine or server; each fails with AssertionError."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.engine.test_lookups import CHUNK, FakeClient
from tests.engine.test_worker_side import test_handles_of_another_epoch_are_refused
from tests.engine.worker_parts import Parts

from kvkeep.types import StageOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.connectors.vllm.scheduler_side import SchedulerSide

FAILED_BLOCK = 7


class Granting(FakeClient):
    """Grants every chunk at once, under lease 100 and so on."""

    waited_s = max_step_wait_s = 0.0

    def begin_step(self) -> None:
        pass

    def call(self, make: Any, *, even_away: bool = False) -> Any:
        call = super().call(make)
        if isinstance(call.message, m.Stage):
            (item,) = call.message.items
            chunks = len(item.hashes) // 32
            column = array("Q", range(chunks)).tobytes()
            call.reply = m.Granted(
                call.message.seq,
                bytes([StageOutcome.GRANTED] * chunks),
                tuple(range(100, 100 + chunks)),
                (m.Columns(column, column, column),),
                0,
            )
        return call

    def wait(self, call: Any, most_s: float = 0.0) -> bool:
        return call.done or super().wait(call, most_s)


def a_step(blocks: list[int], *, computed: int = 0, scheduled: int) -> Any:
    """A step of request `r`: a new one in these blocks, or one that goes on."""
    new = SimpleNamespace(req_id="r", block_ids=(blocks,), num_computed_tokens=computed)
    others = SimpleNamespace(
        req_ids=[] if blocks else ["r"],
        num_computed_tokens=[computed],
        new_block_ids=[None],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        scheduled_new_reqs=[new] if blocks else [],
        scheduled_cached_reqs=others,
        preempted_req_ids=None,
        num_scheduled_tokens={"r": scheduled},
        total_num_scheduled_tokens=scheduled,
    )


def scheduler_side(client: Any, tokens: int) -> "SchedulerSide":
    """It tracks one request, `r`; a block is a chunk."""
    from kvkeep.connectors.vllm.lookups import Revocations
    from kvkeep.connectors.vllm.scheduler_side import SchedulerSide
    from kvkeep.connectors.vllm.tracked import Tracked

    settings: Any = SimpleNamespace(chunk_tokens=CHUNK, block_tokens=CHUNK, writes=True)
    side = SchedulerSide(settings, client, 1, Revocations())
    request: Any = SimpleNamespace(
        request_id="r", cache_salt=None, all_token_ids=list(range(tokens))
    )
    side.requests["r"] = Tracked(request)
    return side


def nothing_is_committed_in_a_step_with_a_failed_load() -> None:
    """Two chunks were staged and copied in the step in which a load into their blocks failed."""
    from kvkeep.connectors.vllm.meta import WorkerMeta

    client: Any = Granting()
    side = scheduler_side(client, tokens=2 * CHUNK + 1)
    meta = side.build_meta(a_step([FAILED_BLOCK, FAILED_BLOCK + 1], scheduled=2 * CHUNK))
    assert len(meta.stages) == 2
    copied = {stage.stage: 1 for stage in meta.stages}
    side.step_done(WorkerMeta(meta.step, copied), {FAILED_BLOCK})
    assert not [call for call in client.calls if isinstance(call.message, m.Commit)]
    assert client.sent == [m.Abort((100, 101))]


@contextmanager
def _parts() -> Iterator[Parts]:
    made = Parts()
    try:
        yield made
    finally:
        made.close()


def no_handle_of_another_epoch_is_used() -> None:
    """The worker's own test of it."""
    with _parts() as parts:
        test_handles_of_another_epoch_are_refused(parts)
