"""Whoever starts servers of its own leaves none behind, however it ends."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import kvkeep_command, kvkeep_env

WITHIN_S = 30.0


def begun(folder: Path) -> subprocess.Popen[str]:
    """A soak whose clients are at work."""
    process = subprocess.Popen(
        kvkeep_command("soak", "--minutes", 5),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=kvkeep_env(TMPDIR=str(folder)),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " of 300 s" in line:
            return process
    raise AssertionError("it ended")


def processes(folder: Path) -> list[int]:
    """Those whose command line or environment names the folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            about = Path(f"/proc/{name}/cmdline").read_bytes()
            about += Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in about:
            found.append(int(name))
    return found


@pytest.fixture
def short() -> Iterator[Path]:
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_stays(short: Path, number: signal.Signals) -> None:
    soak = begun(short)
    assert len(processes(short)) > 2
    soak.send_signal(number)
    soak.communicate(timeout=WITHIN_S)
    until_s = time.monotonic() + WITHIN_S
    while processes(short):
        assert time.monotonic() < until_s, "processes stay"
        time.sleep(0.05)
    if number is not signal.SIGKILL:
        assert not list(short.glob("kvkeep-soak-*"))
