"""A stopped engine holds all of L1 for reading: others get memory, and it never reads theirs."""

import signal
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine, until
from tests.process.obeying import obeying
from tests.process.peer import l1
from tests.servers import running_server

L1_BYTES = 32 << 20
ALL_CHUNKS = L1_BYTES // OBJECT_BYTES
EVERYTHING = {
    "l1.staging_fraction": 1,
    "l1.session_staging_fraction": 1,
    "l1.session_reserve_fraction": 1,
}


@pytest.mark.slow
def test_others_take_what_a_stopped_engine_reads(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, l1_size=L1_BYTES, settings=EVERYTHING) as server,
        obeying("reader", server, "stopped", 1, ALL_CHUNKS) as reader,
        Engine(server.socket, "other").wait_ready() as other,
    ):
        assert l1(server)["reserved_bytes"] == L1_BYTES
        assert other.store(2) == 0, "everything is being read by a process that runs"
        assert other.store(2) == 0
        assert l1(server)["reserved_bytes"] == L1_BYTES
        reader.signal(signal.SIGSTOP)
        until(lambda: other.store(2) == CHAIN_CHUNKS)
        assert other.load(2) == (CHAIN_CHUNKS, 0)
        assert l1(server)["reserved_bytes"] == 0
        reader.signal(signal.SIGCONT)
        reader.tell("read")
        right, lost = map(int, reader.line().split())
        assert right + lost == ALL_CHUNKS
        assert lost >= CHAIN_CHUNKS, "what was taken is lost, and known to be"
