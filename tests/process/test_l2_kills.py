"""The server dies at random points of persisting and fetching, and starts again on the same disk.

One engine stores, looks up and reads all the time; what a key holds follows from the key, so every
byte that L2 brings back is judged. After each death the directory holds whole objects only, within
its cap, and the next server finds them.
"""

import json
import os
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine
from tests.servers import Server, run_kvkeep, running_server

from kvkeep.wire import messages as m

PAGE_BYTES = 4096
CAP = 4 << 20  # about 60 objects, of 320 that are stored
ARENA = "4MiB"  # less than what is stored: lookups need L2
CHAINS = 40
LATEST_S = 0.5  # of a server's life, after the engine has found it
SETTINGS = {"l1.session_staging_fraction": 1}


def directory_bytes(place: Path) -> int:
    """Whole pages of every file, temporaries and what is set aside included."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            if name.endswith(".json") or name == "lock":
                continue
            size = os.lstat(os.path.join(folder, name)).st_size
            total += -(-size // 4096) * 4096
    return total


def work_until_killed(
    engine: Engine, server: Server, rng: random.Random, seen: Counter[str]
) -> None:
    """Store and read until a moment drawn beforehand; then SIGKILL, whatever is under way."""
    die_s = time.monotonic() + rng.random() * LATEST_S
    while time.monotonic() < die_s:
        chain = rng.randrange(CHAINS)
        right, lost = engine.load(chain)
        seen["right"] += right
        seen["lost"] += lost
        if right < CHAIN_CHUNKS:
            seen["stored"] += engine.store(chain)
    for _ in range(3):  # nobody waits for these: fetches run, and so do the persists of before
        packed = b"".join(engine.keys(rng.randrange(CHAINS)))
        engine.client.call(lambda seq, packed=packed: m.Lookup(seq, "r", packed))  # type: ignore[misc]
    time.sleep(rng.random() * 0.01)
    server.kill()


def kill_again_and_again(folder: Path, kills: int, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    place = folder / "l2"
    url = f"fs://{place}?capacity={CAP}"
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as short, ExitStack() as stack:
        socket = f"{short}/k.sock"
        engine = stack.enter_context(Engine(socket, "storm"))
        for _ in range(kills):
            with running_server(
                folder, socket=socket, settings=SETTINGS, l1_size=ARENA, l2=url
            ) as server:
                server.wait_for("l2_scanned")
                assert not list((place / "tmp").iterdir()), "half a file of a dead server stays"
                engine.wait_ready()
                work_until_killed(engine, server, rng, seen)
            assert directory_bytes(place) <= CAP + OBJECT_BYTES + PAGE_BYTES
        with running_server(
            folder, socket=socket, settings=SETTINGS, l1_size=ARENA, l2=url
        ) as server:
            server.wait_for("l2_scanned")
            (store,) = server.status()["l2"]
            assert store["used_bytes"] == directory_bytes(place) <= CAP
            engine.wait_ready()
            for chain in range(CHAINS):
                seen["after"] += engine.load(chain)[0]
    scrub = run_kvkeep("verify", url, "--json")
    assert scrub.returncode == 0, scrub.stdout
    assert json.loads(scrub.stdout)["broken"] == []
    return seen


@pytest.mark.slow
def test_a_server_killed_while_persisting_and_fetching(tmp_path: Path) -> None:
    seen = kill_again_and_again(tmp_path, kills=12, seed=7)
    assert seen["after"], "nothing outlived the deaths"
    assert seen["right"], seen


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_server_killed_two_hundred_times(tmp_path: Path) -> None:
    seen = kill_again_and_again(tmp_path, kills=200, seed=8)
    assert seen["after"], "nothing outlived the deaths"
    assert seen["right"], seen
