"""A server with an engine-like session for the operator commands, and the command in process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.servers import Server, running_server

from kvkeep.bench.session import Session
from kvkeep.cli import main
from kvkeep.core.keys import extend_chain
from kvkeep.wire import messages as m

CHUNK_BYTES = 64 << 10
STORED, STAGED = 3, 1


class Done(NamedTuple):
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, read as JSON."""
        return msgspec.json.decode(self.out)

    @property
    def sentence(self) -> str:
        """Its refusal: one line on stderr, nothing on stdout, no traceback."""
        assert self.out == ""
        assert self.code != 0
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvkeep: ")
        assert "Traceback" not in self.err
        return lines[0]


Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own settings do not reach the commands."""
    for name in [name for name in os.environ if name.startswith("KVKEEP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def kvkeep(capsys: pytest.CaptureFixture[str]) -> Command:
    """`kvkeep(*arguments)` in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


class Busy(NamedTuple):
    """A server and a session on it: three chunks stored and being read, a fourth staged."""

    server: Server
    session: Session


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """For tests that only look."""
    yield from _busy(tmp_path_factory.mktemp("busy"))


@pytest.fixture
def own_busy(tmp_path: Path) -> Iterator[Busy]:
    """For a test that changes it."""
    yield from _busy(tmp_path)


def _busy(folder: Path) -> Iterator[Busy]:
    with (
        running_server(folder) as server,
        Session(server.socket, "cli", CHUNK_BYTES) as session,
    ):
        root = session.root("")
        hashes = extend_chain(root, range((STORED + STAGED) * 256), 256)
        stored, staged = b"".join(hashes[:STORED]), b"".join(hashes[STORED:])
        leases, _ = session.stage(root, stored)
        session.commit(leases)
        session.stage(hashes[STORED - 1], staged)
        found = session.ask(m.Found, lambda seq: m.Lookup(seq, "request-1", stored + staged))
        assert found.chunks == STORED
        yield Busy(server, session)
