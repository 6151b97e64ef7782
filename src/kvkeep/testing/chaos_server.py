"""A real `kvkeep serve` for chaos and soak: started, asked, stopped, killed and started again.

Small, with an `fs` L2 in the same directory, HTTP on a free port of loopback, and a log file for
each life. Knows nothing about clients.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.children import end_with_parent
from kvkeep.config import socket_path_problem
from kvkeep.errors import KVKeepError
from kvkeep.testing.chaos_fork import open_files

START_S = 60.0  # the most, on however busy a machine
STOP_S = 60.0
ANSWER_S = 30.0
SPARE_BYTES = 32 << 20  # of disk, beside L2
_LOOK_S = 0.02
_PAGE_BYTES = 4096
_BROKEN = ("invariant_broken", "io_broken", "populate_failed", "http_ended", "socket_gone")
_SAMPLE = re.compile(r"^(?P<name>[a-z0-9_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


class ServerBroke(KVKeepError):
    """The server under test did not start, answer or stop."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large it is."""

    l1_bytes: int = 64 << 20
    l2_bytes: int = 96 << 20


class RealServer:
    """One place for one server at a time: `folder` has its socket, its L2 and its logs."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.socket = folder / "run" / "k.sock"
        self.place = folder / "l2"
        self.url = ""
        self.lives = 0
        self._size = size
        check_folder(folder, self.socket, size.l2_bytes)
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def l2_url(self) -> str:
        """The L2, as `kvkeep serve` and `kvkeep verify` take it."""
        return f"fs://{self.place}?capacity={self._size.l2_bytes}"

    @property
    def pid(self) -> int:
        """Of the process that runs now, or has run last."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin a life; `serving` says when it has come up."""
        self.lives += 1
        self.url = ""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_env(),
                preexec_fn=end_with_parent,
            )

    def _command(self) -> list[str]:
        settings = {
            "l1.session_staging_fraction": 0.5,
            "l2.backends": self.l2_url,
            "l2.drain_s": 2,
            "l2.breaker_open_s": 0.2,
            "limits.gpu_quarantine_s": 1,
            "http.port": 0,
            "log.format": "json",
        }
        command = [*kvkeep(), "serve", "--socket", str(self.socket)]
        command += ["--l1-size", str(self._size.l1_bytes)]
        return command + [word for pair in settings.items() for word in _set(*pair)]

    @property
    def _log(self) -> Path:
        return self._logs / f"{self.lives}.log"

    def events(self) -> list[dict[str, Any]]:
        """The log of this life, as far as it is written."""
        found = []
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # not one of its own lines, or half of one
                found.append({"event": "text", "text": line})
        return found

    def broken(self) -> list[str]:
        """What this life's log says that must never be said."""
        events = self.events()
        bad = [e for e in events if e["event"] in _BROKEN or "Traceback" in e.get("text", "")]
        return [f"the server's log: {event}" for event in bad]

    def log_end(self) -> str:
        """The last lines of this life's log, for a message."""
        return " ".join(self._log.read_text(errors="replace").splitlines()[-10:])

    def serving(self) -> bool:
        """Whether it has come up; raises ServerBroke when it has ended instead."""
        if not self.url:
            said = next((e for e in self.events() if e.get("event") == "serving"), None)
            if said is not None:
                self.url = said["http"]
            elif self.ended() is not None:
                raise ServerBroke(f"the server ended at its start, and said: {self.log_end()}")
        return bool(self.url)

    def ended(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_whole(self) -> None:
        """Until it serves, all of L1 is populated and L2 is scanned."""
        until(self.serving, START_S, self.log_end)

        def whole() -> bool:
            status = self.status()
            l1, (store,) = status["l1"], status["l2"]
            return bool(
                l1["populated_bytes"] == l1["capacity_bytes"] and store["scanned"] in (1, 1.0)
            )

        until(whole, START_S, self.log_end)

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        until(lambda: self.ended() is not None, STOP_S, self.log_end)
        code = self.ended()
        assert code is not None
        return code

    def end(self) -> None:
        """However it stands: afterwards no process is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_S)

    def get(self, path: str) -> str:
        """One GET; raises ServerBroke when there is no good answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as answer:
                body: bytes = answer.read()
                return body.decode()
        except OSError as error:  # URLError is one
            raise ServerBroke(f"{path}: {error}; {self.log_end()}") from error

    def status(self) -> dict[str, Any]:
        """What `kvkeep status --json` shows."""
        body: dict[str, Any] = json.loads(self.get("/status"))
        return body

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, under its name and labels as they are printed."""
        lines = map(_SAMPLE.match, self.get("/metrics").splitlines())
        return {
            f"{line['name']}{{{line['labels']}}}" if line["labels"] else line["name"]: float(
                line["value"]
            )
            for line in lines
            if line is not None
        }

    def descriptors(self) -> Counter[str]:
        """Its descriptors by kind."""
        kinds = Counter("memfd" if "memfd:" in f else f.split(":")[0] for f in open_files(self.pid))
        files = [kind for kind in kinds if kind.startswith("/")]
        kinds["file"] = sum(kinds.pop(kind) for kind in files)
        return kinds


def check_folder(folder: Path, socket: Path, most_bytes: int) -> None:
    """Raise ServerBroke when a temporary directory will not do for a server."""
    if socket_path_problem(str(socket)):
        raise ServerBroke(
            f"the temporary directory {folder} is too long for a socket: "
            "set TMPDIR to a shorter one"
        )
    free_bytes = shutil.disk_usage(folder).free
    need_bytes = most_bytes + SPARE_BYTES
    if free_bytes < need_bytes:
        raise ServerBroke(
            f"{folder.parent} has {free_bytes >> 20} MiB free and this takes "
            f"{need_bytes >> 20} MiB: set TMPDIR to a place with more"
        )


def kvkeep() -> list[str]:
    """The command line's first words."""
    return [sys.executable, "-m", "kvkeep"]


def _set(key: str, value: object) -> tuple[str, str]:
    return "--set", f"{key}={value}"


def _env() -> dict[str, str]:
    """Without settings of a server: the defaults are what is tested."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}


def until(holds: Callable[[], bool], timeout_s: float, story: Callable[[], str]) -> None:
    """Wait until it holds; raises ServerBroke with the story when it never does."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until_s:
            raise ServerBroke(f"nothing came of it within {timeout_s} s: {story()}")
        time.sleep(_LOOK_S)


def disk_bytes(place: Path) -> int:
    """Whole pages of every file of an L2, half-written ones and what is set aside included."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            if not name.endswith(".json") and name != "lock":
                size = os.lstat(os.path.join(folder, name)).st_size
                total += -(-size // _PAGE_BYTES) * _PAGE_BYTES
    return total
