"""Starts a server for this engine if none is there: for trying things out, not for production.

Engines race, so whoever holds the lock file beside the socket starts one and the others use it. The
server lives in a session of its own and is nobody's child: vLLM kills its whole process tree when
it ends. A server that does not come up costs one log line; the engine goes on without it.
"""

import contextlib
import fcntl
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

from kvkeep.client import Client
from kvkeep.errors import KVKeepError
from kvkeep.types import Role
from kvkeep.wire import messages as m

START_LIMIT_S = 30.0
_LOOK_S = 0.05
_LOCK_SUFFIX = ".autostart"
# The process between this one and the server: it ends at once, so that init adopts the server.
_IN_BETWEEN = "import os, sys\nif os.fork() == 0: os.execv(sys.argv[1], sys.argv[1:])\n"
_log = logging.getLogger("vllm.kvkeep")


class Start(Enum):
    """How it went."""

    THERE = "there already"
    STARTED = "started"
    FAILED = "failed"


def start_beside(path: str, flags: Sequence[str]) -> threading.Thread:
    """Do it in a thread: an engine's start does not wait for it. Its client connects by itself."""
    thread = threading.Thread(
        target=ensure_server, args=(path, flags), name="kvkeep-autostart", daemon=True
    )
    thread.start()
    return thread


def ensure_server(path: str, flags: Sequence[str], limit_s: float = START_LIMIT_S) -> Start:
    """See that a server answers at this socket; logs why not. Never raises."""
    until_s = time.monotonic() + limit_s
    try:
        if answers(path):
            return Start.THERE
        _make_directory(Path(path).parent)
        with _lock(path + _LOCK_SUFFIX, until_s):
            if answers(path):
                return Start.THERE
            why = _start(path, flags, until_s)
    except OSError as error:
        why = str(error)
    if why:
        _log.warning("kvkeep: no server was started at %s: %s; serving without it", path, why)
        return Start.FAILED
    _log.info("kvkeep: started a server at %s, it logs to %s", path, _log_path(path))
    return Start.STARTED


def answers(path: str) -> bool:
    """Whether a server admits connections there; a socket that only accepts is not enough."""
    hello = m.Hello(m.VERSIONS, "", Role.OPERATOR, wants_arena=False, client="kvkeep autostart")
    client = Client(path, hello)
    try:
        client.connect()
    except (KVKeepError, OSError):
        return False
    client.close()
    return True


@contextlib.contextmanager
def _lock(path: str, until_s: float) -> Iterator[None]:
    """Hold the lock; raises TimeoutError when another engine holds it for too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"another engine holds {path}") from None
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _start(path: str, flags: Sequence[str], until_s: float) -> str:
    """Start it and wait until it answers; returns why it did not, or nothing."""
    server = [sys.executable, "-m", "kvkeep", "serve", "--socket", path, *flags]
    alive, theirs = os.pipe()  # the server holds the other end for life: its end shows here
    try:
        with open(_log_path(path), "ab", opener=_private) as log:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _IN_BETWEEN, *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
                check=True,
                timeout=max(1.0, until_s - time.monotonic()),
            )
    except subprocess.SubprocessError as error:
        os.close(alive)
        return str(error)
    finally:
        os.close(theirs)
    try:
        while time.monotonic() < until_s:
            if answers(path):
                return ""
            if select.select([alive], [], [], _LOOK_S)[0]:
                return f"it ended at once: {_last_line(path)}"
        return f"it does not answer; see {_log_path(path)}"
    finally:
        os.close(alive)


def _make_directory(folder: Path) -> None:
    """As the server makes it: closed to others, whatever the umask."""
    for above in reversed(folder.parents):
        above.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _log_path(path: str) -> str:
    return path + ".log"


def _last_line(path: str) -> str:
    with open(_log_path(path), errors="replace") as log:
        lines = [line.strip() for line in log if line.strip()]
    return f"{lines[-1] if lines else 'it said nothing'} ({_log_path(path)})"
