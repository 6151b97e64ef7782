"""The memory that a real server takes under load stays within the budget that it prints."""

import os
from pathlib import Path

import pytest
from tests.process.engine import Engine
from tests.servers import Server, run_kvkeep, running_server

from kvkeep.limits import memory_budget
from kvkeep.types import GroupKind, RowSpec

L1_BYTES = 16 << 20
SMALL = RowSpec(0, GroupKind.FULL_ATTENTION, 4096)
CHUNKS, REQUESTS = 256, 20  # more than fit: the index is full, and chunks are evicted


def of_process(server: Server) -> dict[str, int]:
    """Bytes by the names of the kernel."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


@pytest.mark.slow
def test_a_server_under_load_stays_within_its_budget(tmp_path: Path) -> None:
    l2 = f"fs://{tmp_path}/l2?capacity=200MiB"
    with running_server(tmp_path, l1_size="16MiB", l2=l2) as server:
        said = server.wait_for("memory")
        budget = server.status()["memory"]
        assert said["most_bytes"] == budget["total_bytes"] == sum(budget["parts"].values())
        assert budget["parts"]["L1"] == L1_BYTES
        with Engine(server.socket, "s", rows=(SMALL,)).wait_ready() as engine:
            for request in range(REQUESTS):
                engine.commit(engine.stage(request, CHUNKS))
                engine.end(engine.lookup(request // 2, CHUNKS))
            assert run_kvkeep("wait-persisted", "--socket", server.socket).returncode == 0
            assert run_kvkeep("clear", "--socket", server.socket).returncode == 0
            for request in range(REQUESTS):
                engine.end(engine.lookup(request, CHUNKS))
            for path in ("/status", "/metrics") * 20:
                server.get(path)
        seen = of_process(server)
        # Pages of L1 that the server never touched itself are memory all the same.
        peak_bytes = seen["VmHWM"] - seen["RssShmem"] + L1_BYTES
        print(f"peak {peak_bytes >> 20} MiB of {budget['total_bytes'] >> 20} MiB")
        assert peak_bytes <= budget["total_bytes"]
        assert peak_bytes > budget["total_bytes"] // 3, "a budget that says nothing"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """An L1 that fits alone, with an index for so many objects that both do not."""
    most_mib = int(0.95 * memory_budget().free_bytes) >> 20
    socket = tmp_path / "s"
    objects = "l1.max_objects=16777216"
    run = run_kvkeep("serve", "--socket", socket, "--l1-size", f"{most_mib}MiB", "--set", objects)
    assert run.returncode != 0
    assert "the server may need" in run.stderr
    assert "set l1.size to" in run.stderr
    assert "process 96MiB" in run.stderr
    assert not socket.exists()
    assert not os.path.exists(f"{socket}.lock")
