"""What a store copies, and what a step that only decodes costs: nothing of the server's time."""

from typing import Any

import pytest
from tests.engine.test_lookups import CHUNK
from tests.engine.test_worker_side import stage
from tests.engine.worker_parts import Parts
from tests.mutations.connector_checks import Granting, a_step, scheduler_side

from kvkeep.wire import messages as m

pytestmark = pytest.mark.engine


def test_blocks_that_are_reused_at_once_do_not_change_what_was_stored(parts: Parts) -> None:
    from kvkeep.connectors.vllm.meta import StepMeta

    parts.table.words[3] = 5
    parts.side.save(StepMeta(1, [], [stage(1, offset=0, generation=5)]))
    parts.storage.zero_()  # the engine gives the blocks to somebody else
    want = parts.pool[:, 1:3].contiguous().numpy().tobytes()
    assert parts.side.take_report(1).copied == {1: 1}
    assert parts.bytes_at(0, len(want)) == want
    assert want != bytes(len(want))


def test_a_step_that_completes_no_chunk_asks_the_server_nothing() -> None:
    """Decoding goes on for hundreds of steps between two chunks: one Ping a second is all."""
    client: Any = Granting()
    side = scheduler_side(client, tokens=2 * CHUNK + 1)
    assert len(side.build_meta(a_step([7, 8], scheduled=2 * CHUNK)).stages) == 2
    asked = len(client.calls)
    for step in range(CHUNK - 2):
        side.requests["r"].request.all_token_ids.append(step)
        meta = side.build_meta(a_step([], computed=2 * CHUNK + step, scheduled=1))
        assert meta.stages == []
        assert meta.loads == []
    new = [call.message for call in client.calls[asked:]]
    assert [message for message in new if not isinstance(message, m.Ping)] == []
    assert client.waits_s == []
