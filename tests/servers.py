"""A real `kvkeep serve` as a process, for tests that need one: started, watched, ended by its pid.

`running_server(tmp_path)` is a context manager; flags are the command's own, with underscores:
`running_server(tmp_path, l1_size="64MiB", eviction="lru")`. Settings without a flag of their own go
through `settings={"l1.session_staging_fraction": 1}`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
SMALL_L1 = "16MiB"


def kvkeep_command(*arguments: object) -> list[str]:
    """The `kvkeep` of this tree as a command line."""
    return [sys.executable, "-m", "kvkeep", *map(str, arguments)]


def kvkeep_env(**changes: str) -> dict[str, str]:
    """This environment without any setting of a server, so that tests see the defaults."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    path = os.pathsep.join(filter(None, (str(SRC), env.get("PYTHONPATH", ""))))
    return env | {"PYTHONPATH": path} | changes


def run_kvkeep(
    *arguments: object, timeout_s: float = 60.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        kvkeep_command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=kvkeep_env(**env),
    )


@dataclass(slots=True)
class Server:
    """One server process. `log` grows while it runs: one dict per line, in order."""

    process: subprocess.Popen[str]
    socket: str
    log: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""  # "off" without HTTP
    _more: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid

    def wait_for(self, event: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The first log line of this event; fails when it does not come or the server ends."""
        deadline = time.monotonic() + timeout_s
        with self._more:
            while True:
                for line in self.log:
                    if line.get("event") == event:
                        return line
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {event!r} within {timeout_s} s: {self.log}"
                assert not self._ended, f"the server ended before {event!r}: {self.log}"
                self._more.wait(left_s)

    def get(self, path: str) -> tuple[int, str]:
        """(HTTP status, body) of one GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        """The server's status by HTTP."""
        code, body = self.get("/status")
        assert code == 200
        answer: dict[str, Any] = json.loads(body)
        return answer

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def read_log(self) -> None:
        """Collect lines until the process closes its stderr (runs in a thread)."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"text": text.rstrip("\n")}
            with self._more:
                self.log.append(line)
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()


@contextmanager
def running_server(
    folder: Path,
    *,
    socket: str | None = None,
    settings: Mapping[str, object] | None = None,
    populated: bool = True,
    **flags: object,
) -> Iterator[Server]:
    """A server that accepts connections, and (unless told otherwise) has populated its L1.

    Its socket is made below `folder`, or in a short temporary directory when that path is too long.
    """
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as short:
        path = socket or str(folder / "run" / "kvkeep.sock")
        if len(path) > 100:
            path = str(Path(short) / "run" / "kvkeep.sock")
        given = {"socket": path, "l1_size": SMALL_L1, "http_port": 0, "log_format": "json"} | flags
        arguments = [part for pair in given.items() for part in _flag(*pair)]
        for key, value in (settings or {}).items():
            arguments += ["--set", f"{key}={value}"]
        process = subprocess.Popen(
            kvkeep_command("serve", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=kvkeep_env(),
        )
        yield from _while_running(Server(process, path), populated=populated)


def _while_running(server: Server, *, populated: bool) -> Iterator[Server]:
    reader = threading.Thread(target=server.read_log, name="server-log", daemon=True)
    reader.start()
    try:
        server.url = str(server.wait_for("serving")["http"])
        if populated:
            server.wait_for("populated")
        yield server
    finally:
        if server.process.poll() is None:
            # A stopped process (SIGSTOP) would not see SIGTERM.
            server.process.send_signal(signal.SIGCONT)
            server.process.terminate()
            try:
                server.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
        reader.join(STOP_TIMEOUT_S)
        assert server.process.stderr is not None
        server.process.stderr.close()


def _flag(name: str, value: object) -> list[str]:
    """`no_http=True` is `--no-http`; everything else takes a value; None is not given."""
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [option] if value else []
    return [option, str(value)]
