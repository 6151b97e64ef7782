"""Fuzz target: raw bytes and descriptors to the control socket of a real server process.

An input is a script for up to eight connections at once, each with a thread of its own: half a
Hello, garbage, too many descriptors, an end in the middle. Afterwards the server is alive, says
that it is well, has no session left, no descriptor more than before, and has logged no error.
"""

import array
import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvkeep import shm
from kvkeep.children import end_with_parent
from kvkeep.testing.chaos_server import check_folder
from kvkeep.testing.fuzz_values import (
    Script,
    Step,
    Value,
    changed_data,
    pack,
    unpack,
)
from kvkeep.types import GroupKind, Role, RowSpec
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

_WHO = 8
_MOST_DESCRIPTORS = 60
_MOST_BYTES = 1 << 17
_HANDSHAKE_S = 0.5
_START_S, _SETTLE_S = 30.0, 10.0
_SHORT_S = 0.05
_SHORT_HANDSHAKES = f"limits.handshake_timeout_s={_HANDSHAKE_S}"
_FLAGS = ["--l1-size=4MiB", "--http-port=0", "--log-format=json", f"--set={_SHORT_HANDSHAKES}"]
_ROWS = (RowSpec(0, GroupKind.FULL_ATTENTION, 4096),)


class Handshake:
    """The target; its server lives as long as it."""

    name = "handshake"

    def __init__(self) -> None:
        self._server: _Server | None = None

    def seeds(self) -> Mapping[str, bytes]:
        """What clients do, and what others try."""
        return {name: pack(script) for name, script in _scripts().items()}

    def changed(self, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """Steps and bytes changed."""
        return changed_data(rng, data, others, _new_step)

    def run(self, data: bytes) -> frozenset[str]:
        """All connections at once, then the server's state."""
        if self._server is None:
            self._server = _Server()
        script = unpack(data)
        steps: Script = [[0, "send", data]] if script is None else script
        seen = self._server.receive(steps)
        self._server.check()
        return seen

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.end()
            self._server = None


class _Server:
    """One `kvkeep serve` in a process of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-")
        folder = Path(self._folder.name)
        self.socket = str(folder / "run" / "s")
        check_folder(folder, Path(self.socket), 0)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvkeep", "serve", "--socket", self.socket, *_FLAGS],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        self._url = self._served()
        self.receive([[0, "say", _said(_hello())], [0, "read", None]])
        self._get("/healthz")
        time.sleep(2 * _SHORT_S)
        self._descriptors = self._count()

    def end(self) -> None:
        """Stop it, and remove its directory."""
        self._process.terminate()
        try:
            self._process.wait(_SETTLE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def receive(self, script: Script) -> frozenset[str]:
        """Every connection of the script in a thread; what they were answered."""
        seen: set[str] = set()
        threads = [
            threading.Thread(target=_Stranger(self.socket, seen).play, args=(list(steps),))
            for steps in _by_connection(script)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return frozenset(seen)

    def check(self) -> None:
        """Alive, well, and nothing left of anybody."""
        assert self._process.poll() is None, f"the server has ended: {self._said()[-2000:]}"
        assert self._get("/healthz") == 200, "/healthz is not 200"
        until_s = time.monotonic() + _SETTLE_S
        while self._count() > self._descriptors or self._sessions():
            assert time.monotonic() < until_s, (
                f"{self._count()} descriptors, {self._descriptors} before; "
                f"sessions: {self._sessions()}"
            )
            time.sleep(0.005)
        said = self._said()
        assert "Traceback" not in said, said[said.index("Traceback") :][:2000]

    def _served(self) -> str:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            for line in self._said().splitlines():
                with contextlib.suppress(ValueError):
                    if json.loads(line).get("event") == "serving":
                        return str(json.loads(line)["http"])
            time.sleep(0.02)
        raise AssertionError(f"the server does not start: {self._said()[-2000:]}")

    def _said(self) -> str:
        return self._log.read_text(errors="replace")

    def _count(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def _sessions(self) -> list[Any]:
        with urllib.request.urlopen(self._url + "/status", timeout=_SETTLE_S) as answer:
            return list(json.load(answer)["sessions"])

    def _get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self._url + path, timeout=_SETTLE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


class _Stranger:
    """One thread's connection."""

    def __init__(self, path: str, seen: set[str]) -> None:
        self._seen = seen
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(_SHORT_S)
        with contextlib.suppress(OSError):
            self._sock.connect(path)

    def play(self, steps: list[Step]) -> None:
        """Its steps in order; an end from the other side is no surprise."""
        with self._sock:
            for _, what, argument in steps:
                try:
                    self._take(what, argument)
                except OSError as error:
                    self._seen.add(f"{what}: {type(error).__name__} {error.errno}")

    def _take(self, what: str, argument: Value) -> None:
        match what:
            case "send" if isinstance(argument, bytes):
                self._sock.sendall(argument[:_MOST_BYTES])
            case "say":
                with contextlib.suppress(OverflowError, ValueError, RecursionError):
                    body = msgspec.msgpack.encode(argument)
                    self._sock.sendall(len(body).to_bytes(4, "little") + body)
            case "fds":
                match argument:
                    case [int() as count, bytes() as data] if data and count >= 0:
                        self._send_descriptors(count % _MOST_DESCRIPTORS, data[:_MOST_BYTES])
            case "read":
                self._read()
            case "half":
                self._sock.shutdown(socket.SHUT_WR)
            case "wait" if isinstance(argument, float) and argument >= 0:
                time.sleep(min(argument, 0.1))

    def _send_descriptors(self, count: int, data: bytes) -> None:
        """Some of this process, some of files: the server may want the first one at most."""
        fds = [os.pidfd_open(os.getpid()) if n % 2 == 0 else os.dup(0) for n in range(count)]
        try:
            what = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._sock.sendmsg([data], what)
        finally:
            for fd in fds:
                os.close(fd)

    def _read(self) -> None:
        data, fds = shm.receive_with_fds(self._sock, 1 << 16)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(msgspec.DecodeError, IndexError, TypeError):
            answer = msgspec.msgpack.decode(data[4:])
            why = str(answer[1]) if answer[0] == "refused" else ""
            letters = "".join(c for c in why if c.isalpha() or c == " ")
            self._seen.add(f"{answer[0]} {len(fds)} {letters[:80]}")


def _by_connection(script: Script) -> list[list[Step]]:
    steps = [
        [step[0] % _WHO, step[1], step[2]]
        for step in script
        if len(step) == 3 and isinstance(step[0], int) and isinstance(step[1], str)
    ]
    steps.sort(key=lambda step: int(step[0]))  # stable: each keeps its order
    return [list(some) for _, some in itertools.groupby(steps, key=lambda step: step[0])]


def _said(message: m.ClientMessage) -> Value:
    return msgspec.msgpack.decode(encode(message)[4:])


def _hello() -> m.Hello:
    return m.Hello(m.VERSIONS, "s", Role.BOTH, rows=_ROWS, fingerprint=b"\x01" * 32)


def _scripts() -> dict[str, Script]:
    hello = _said(_hello())
    frame = encode(_hello())
    operator = _said(m.Hello(m.VERSIONS, "", Role.OPERATOR, wants_arena=False))
    ping, bye = _said(m.Ping(1)), _said(m.Bye())
    return {
        "engine": [
            [0, "say", hello],
            [0, "read", None],
            [0, "say", ping],
            [0, "say", bye],
            [0, "read", None],
        ],
        "operator": [
            [0, "say", operator],
            [0, "read", None],
            [0, "say", _said(m.Query(1, "status"))],
            [0, "read", None],
        ],
        "its-own-process": [[0, "fds", [1, frame]], [0, "read", None]],
        "many-descriptors": [[n, "fds", [n * 7, frame]] for n in range(_WHO)],
        "descriptors-in-parts": [[0, "fds", [1, frame[n : n + 1]]] for n in range(8)],
        "half-a-hello": [[0, "send", frame[:7]], [0, "wait", 0.05]],
        "one-by-one": [[0, "send", frame[n : n + 1]] for n in range(len(frame))],
        "hello-twice": [[0, "say", hello], [0, "say", hello], [0, "read", None]],
        "hello-and-more": [[0, "send", frame + encode(m.Ping(1))], [0, "read", None]],
        "no-hello": [[0, "say", ping], [0, "read", None]],
        "http": [[0, "send", b"GET / HTTP/1.1\r\n\r\n"], [0, "read", None]],
        "half-closed": [[0, "say", hello], [0, "half", None], [0, "read", None]],
        "nobody-reads": [[0, "say", hello], *([[0, "say", ping]] * 20)],
        "all-at-once": [[n, "say", hello] for n in range(_WHO)],
        "too-long": [[0, "send", b"\x01\x00\x01\x00" + bytes(16)], [0, "read", None]],
        "nothing": [[0, "wait", 0.01]],
    }


def _new_step(rng: random.Random) -> Step:
    who = rng.randrange(_WHO)
    match rng.randrange(6):
        case 0:
            return [who, "read", None]
        case 1:
            return [who, "half", None]
        case 2:
            return [who, "fds", [rng.randrange(8), rng.randbytes(rng.choice((1, 4, 100)))]]
        case 3:
            return [who, "send", rng.randbytes(rng.choice((1, 4, 5, 300)))]
        case _:
            step = list(rng.choice(rng.choice(list(_scripts().values()))))
            step[0] = who
            return step
