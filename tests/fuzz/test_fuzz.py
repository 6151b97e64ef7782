"""The stored inputs run clean, a minute of new ones does too, and planted bugs are found."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fuzz.make_corpus import CORPUS
from tests.servers import run_kvkeep

from kvkeep.backends import header
from kvkeep.backends.checked import Store
from kvkeep.core.directory import Directory
from kvkeep.core.sweeping import Sweeper
from kvkeep.server.service import Service
from kvkeep.testing import fuzz, fuzz_handshake
from kvkeep.testing.fuzz_values import pack, unpack
from kvkeep.testing.fuzz_wire_rig import LEASE
from kvkeep.types import Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

QUICK = ("wire", "header")
SHORT_S, LONG_S = 60.0, 600.0

Patch = pytest.MonkeyPatch


def clean(name: str, data: bytes) -> None:
    assert fuzz.replay(name, data) == ""


def stored(*names: str) -> list[Any]:
    return [
        pytest.param(name, data, id=f"{name}-{title}")
        for name in names
        for title, data in fuzz.inputs_of(CORPUS, name).items()
    ]


def test_the_corpus_is_there_and_what_the_targets_start_from_is_in_it() -> None:
    for name in fuzz.TARGETS:
        target = fuzz.open_target(name)
        here = fuzz.inputs_of(CORPUS, name)
        for title, data in target.seeds().items():
            assert here.get(title) == data, f"run python -m tests.fuzz.make_corpus: {name}/{title}"
        target.close()


def test_every_type_of_message_is_in_the_corpus() -> None:
    everything = b"".join(fuzz.inputs_of(CORPUS, "wire").values())
    for kind in fuzz_types():
        assert kind.encode() in everything, f"no input has the message {kind}"


def fuzz_types() -> list[str]:
    return [str(kind.__struct_config__.tag) for kind in m.ClientMessage.__args__]


@pytest.mark.parametrize(("name", "data"), stored(*QUICK))
def test_a_stored_input_runs_clean(name: str, data: bytes) -> None:
    clean(name, data)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), stored("file"))
def test_a_stored_input_of_files_runs_clean(name: str, data: bytes) -> None:
    clean(name, data)


@pytest.mark.slow
def test_the_stored_handshakes_run_clean() -> None:
    target = fuzz.open_target("handshake")
    try:
        for title, data in fuzz.inputs_of(CORPUS, "handshake").items():
            assert target.run(data) is not None, title
    finally:
        target.close()


def fuzzed(seconds: float, tmp_path: Path, *targets: str, seed: int = 0) -> dict[str, Any]:
    plan = fuzz.Plan(seconds, targets or fuzz.TARGETS, seed, tmp_path / "found", CORPUS)
    return fuzz.run(plan)


@pytest.mark.slow
def test_a_minute_is_clean(tmp_path: Path) -> None:
    report = fuzzed(SHORT_S, tmp_path)
    assert report["failures"] == []
    for name, row in report["targets"].items():
        assert row["inputs"] > 20, name


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_ten_minutes_are_clean(tmp_path: Path) -> None:
    assert fuzzed(LONG_S, tmp_path, seed=1)["failures"] == []


@pytest.mark.slow
def test_the_command_reports_and_runs_one_input_again(tmp_path: Path) -> None:
    run = run_kvkeep("fuzz", "--seconds", 1, "--target", "header", "--json")
    report = json.loads(run.stdout)
    assert run.returncode == 0
    assert {"seconds", "inputs", "targets", "failures"} <= report.keys()
    assert report["inputs"] == report["targets"]["header"]["inputs"] > 10
    stored_input = CORPUS / "wire" / "abort.bin"
    again = run_kvkeep("fuzz", "--target", "wire", "--input", stored_input)
    assert (again.returncode, again.stdout) == (0, "wire: nothing is wrong\n")
    for wrong in (["--target", "nothing"], ["--input", stored_input]):
        assert run_kvkeep("fuzz", *wrong).returncode == 2


def test_a_failure_is_shortened_saved_and_says_how_to_see_it_again(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    a_note_kills(monkeypatch)
    report = fuzzed(0.2, tmp_path, "wire")
    [found] = report["failures"]
    assert found["what"].startswith("ValueError: a note")
    path = Path(found["input"])
    assert found["again"] == f"kvkeep fuzz --target wire --input {path}"
    assert fuzz.replay("wire", path.read_bytes()) == found["what"]
    assert len(path.read_bytes()) < 250, "not shortened"


def test_what_hangs_is_a_failure_like_any_other(monkeypatch: Patch) -> None:
    a_ping_never_ends(monkeypatch)
    monkeypatch.setattr(fuzz, "_MOST_S", 0.2)
    ping = fuzz.open_target("wire").seeds()["note-and-ping"]
    assert "takes more than 0 s" in fuzz.replay("wire", ping)


# ---- planted bugs: what targets start from is enough to find these


def a_note_kills(patch: Patch) -> None:
    receive = Service.receive

    def kill(self: Service, peer: Any, message: Any) -> None:
        if isinstance(message, m.Note):
            raise ValueError("a note")
        receive(self, peer, message)

    patch.setattr(Service, "receive", kill)


def a_ping_never_ends(patch: Patch) -> None:
    receive = Service.receive

    def spin(self: Service, peer: Any, message: Any) -> None:
        while isinstance(message, m.Ping):
            pass
        receive(self, peer, message)

    patch.setattr(Service, "receive", spin)


def a_ping_is_answered_twice(patch: Patch) -> None:
    receive = Service.receive

    def twice(self: Service, peer: Any, message: Any) -> None:
        receive(self, peer, message)
        if isinstance(message, m.Ping):
            receive(self, peer, message)

    patch.setattr(Service, "receive", twice)


def a_forget_is_not_answered(patch: Patch) -> None:
    receive = Service.receive

    def lost(self: Service, peer: Any, message: Any) -> None:
        if not isinstance(message, m.Forget):
            receive(self, peer, message)

    patch.setattr(Service, "receive", lost)


def reads_outlive_their_connection(patch: Patch) -> None:
    patch.setattr(Sweeper, "end_reads", lambda self, session, ranks: None)


def anybody_may_end_a_read(patch: Patch) -> None:
    end = Directory._end

    def of_anybody(self: Directory, event: Any) -> Any:
        for name, session in self.sessions.items():
            if event.lease in session.reads_open:
                event = msgspec.structs.replace(event, session=name)
        return end(self, event)

    patch.setattr(Directory, "_end", of_anybody)


def orphans_are_kept(patch: Patch) -> None:
    patch.setattr(Service, "gone", lambda self, peer, confirmed=False: None)


WIRE_BUGS: tuple[Callable[[Patch], None], ...] = (
    a_note_kills,
    a_ping_is_answered_twice,
    a_forget_is_not_answered,
    reads_outlive_their_connection,
    orphans_are_kept,
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", WIRE_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_behind_the_wire_is_found(
    plant: Callable[[Patch], None], monkeypatch: Patch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    assert fuzzed(0.1, tmp_path, "wire")["failures"]


def test_a_stranger_that_ends_the_read_of_another_is_noticed(monkeypatch: Patch) -> None:
    """The good engine's lease is the only one handed out yet."""
    store = unpack(fuzz.open_target("wire").seeds()["abort"])
    assert store is not None
    script = pack([store[0], [1, "say", ["end", LEASE, [0], 0]]])
    assert fuzz.replay("wire", script) == ""
    anybody_may_end_a_read(monkeypatch)
    assert "a stranger ended a read" in fuzz.replay("wire", script)


def test_a_page_that_is_not_compared_is_noticed(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(header, "_foreign", lambda found, space, key: None)
    assert fuzzed(0.1, tmp_path, "header")["failures"]


@pytest.mark.slow
def test_bytes_that_are_not_verified_are_noticed(monkeypatch: Patch, tmp_path: Path) -> None:
    async def believe(self: Store, items: Any, verdicts: Any) -> None:
        pass

    monkeypatch.setattr(Store, "_check_payloads", believe)
    assert any("wrong bytes" in row["what"] for row in fuzzed(0.1, tmp_path, "file")["failures"])


@pytest.mark.slow
def test_what_a_handshake_leaves_behind_is_noticed(monkeypatch: Patch) -> None:
    """Somebody stays connected meanwhile: for the target that is a session nobody ended."""
    monkeypatch.setattr(fuzz_handshake, "_SETTLE_S", 1.0)
    target = fuzz_handshake.Handshake()
    try:
        nothing = target.seeds()["nothing"]
        target.run(nothing)
        assert target._server is not None
        with socket.socket(socket.AF_UNIX) as stays:
            stays.connect(target._server.socket)
            stays.sendall(encode(m.Hello(m.VERSIONS, "stays", Role.SCHEDULER)))
            with pytest.raises(AssertionError, match="descriptors"):
                target.run(nothing)
        target.run(nothing)
    finally:
        target.close()
