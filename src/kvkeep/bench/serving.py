"""Starts a real `kvkeep serve` as a second process for a bench, and ends it.

The server is the same command a user types, on a socket of its own in a temporary directory.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvkeep.children import end_with_parent
from kvkeep.connect import open_socket
from kvkeep.errors import KVKeepError, SocketError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.01


class ServerFailed(KVKeepError):
    """The server of a bench did not start; the text is what it said."""


@contextmanager
def started_server(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield the socket of a server with these settings (dotted keys); no HTTP."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        path = str(Path(folder) / "kvkeep.sock")
        command = [sys.executable, "-m", "kvkeep", "serve", "--socket", path, "--no-http"]
        command += ["--log-level", "warning"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=end_with_parent,
        )
        try:
            _await_start(process, path)
            yield path
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _await_start(process: subprocess.Popen[bytes], path: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace").strip()
            raise ServerFailed(said.removeprefix("kvkeep: ") or "the bench's server ended at once")
        try:
            open_socket(path).close()
        except SocketError:
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the bench's server did not start within {START_TIMEOUT_S} s"
                ) from None
            time.sleep(_POLL_S)
        else:
            return
