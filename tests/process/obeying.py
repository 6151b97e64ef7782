"""Starts a process that holds memory of a server and does what it is told, one word a line."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers import Server, kvkeep_env


@dataclass(slots=True)
class Obeying:
    """It answers a word with a line."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(10)


@contextmanager
def obeying(
    module: str, server: Server, session: str, request: int, chunks: int
) -> Iterator[Obeying]:
    """`module` of tests.process; it begins by saying that it holds the chunks."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", f"tests.process.{module}", server.socket),
            *(session, str(request), str(chunks)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=kvkeep_env(),
        cwd=Path(__file__).parents[2],
    )
    held = Obeying(process)
    try:
        assert held.line() == f"held {chunks}"
        yield held
    finally:
        process.kill()
        process.communicate()
