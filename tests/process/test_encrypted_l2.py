"""Real servers on one encrypted disk: restart, rotation, a key that is lost and comes back."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.engine import CHAIN_CHUNKS, Engine
from tests.servers import Server, run_kvkeep, running_server

from kvkeep.backends.keyring import new_key

pytestmark = pytest.mark.slow


@contextmanager
def serving(folder: Path, keys: Path, socket: str) -> Iterator[tuple[Server, Engine]]:
    """A server and an engine that it knows; at the end L2 has everything."""
    l2 = f"fs://{folder}/l2?capacity=16MiB"
    settings = {"l2.key_file": keys, "l1.session_staging_fraction": 1}
    with (
        running_server(folder, socket=socket, settings=settings, l2=l2) as server,
        Engine(socket, "one") as engine,
    ):
        server.wait_for("l2_scanned")
        engine.wait_ready()
        yield server, engine
        run_kvkeep("wait-persisted", "--socket", socket)


def l2_status(server: Server) -> dict[str, Any]:
    [store] = server.status()["l2"]
    return dict(store)


def test_what_a_key_wrote_is_read_with_it_and_only_with_it(tmp_path: Path) -> None:
    keys, lost = tmp_path / "l2.keys", tmp_path / "lost.keys"
    new_key(str(keys), "old")
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as short:
        socket = f"{short}/k.sock"
        with serving(tmp_path, keys, socket) as (server, engine):
            assert engine.store(1) == CHAIN_CHUNKS
        lost.touch(0o600)
        lost.write_text(keys.read_text())
        new_key(str(keys), "new")
        with serving(tmp_path, keys, socket) as (server, engine):  # rotated
            assert engine.load(1) == (CHAIN_CHUNKS, 0)
            assert engine.store(2) == CHAIN_CHUNKS
            assert l2_status(server)["encryption"]["key"] == "new"
        with serving(tmp_path, lost, socket) as (server, engine):  # without the new key
            assert engine.load(1) == (CHAIN_CHUNKS, 0)
            assert engine.load(2)[0] == 0
            store = l2_status(server)
            assert store["unreadable"]["no_key"] > 0
            assert (store["corrupt"], store["quarantined"]) == ({}, 0)
        with serving(tmp_path, keys, socket) as (server, engine):  # and with it again
            assert engine.load(1) == (CHAIN_CHUNKS, 0)
            assert engine.load(2) == (CHAIN_CHUNKS, 0)
    scrub = run_kvkeep("verify", tmp_path / "l2", "--key-file", keys, "--json")
    report = json.loads(scrub.stdout)
    assert (scrub.returncode, report["broken"], report["unchecked"]) == (0, [], 0)
    assert report["objects"] >= 2 * CHAIN_CHUNKS
