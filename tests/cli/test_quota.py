"""`kvkeep quota` against a real server: list, set, unset, and what a restart finds again."""

import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command
from tests.servers import Server, run_kvkeep, running_server

from kvkeep.bench.session import Session
from kvkeep.config import QuotaConfig
from kvkeep.core.keys import extend_chain, root_hash
from kvkeep.errors import ConfigError
from kvkeep.server.quota_book import QuotaBook, digest_of
from kvkeep.types import Fingerprint, StageOutcome
from kvkeep.wire import messages as m

CHUNK_BYTES = 64 << 10
GRANTED, OVER = StageOutcome.GRANTED, StageOutcome.OVER_QUOTA


def store(session: Session, salt: str | None, numbers: Sequence[int]) -> list[StageOutcome]:
    """Prompts of one chunk each, stored under a salt."""
    assert session.client.ready is not None
    root = root_hash(Fingerprint(session.client.ready.fingerprint), salt)
    outcomes: list[StageOutcome] = []
    for number in numbers:
        (chunk,) = extend_chain(root, [number] * 256, 256)
        granted = _stage(session, m.StageItem("r", bytes(root), bytes(chunk), salt))
        outcomes += map(StageOutcome, granted.outcomes)
        if granted.leases:
            session.commit(granted.leases)
    return outcomes


def _stage(session: Session, item: m.StageItem) -> m.Granted:
    return session.ask(m.Granted, lambda seq: m.Stage(seq, (item,)))


def store_soon(session: Session, salt: str | None, number: int) -> None:
    """Again while the tenant's older chunks are on their way to L2, and so must stay."""
    until_s = time.monotonic() + 30.0
    while (outcome := store(session, salt, [number])) == [OVER]:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert outcome == [GRANTED]


def tenant(answer: dict[str, Any], salt: str | None) -> dict[str, Any]:
    rows = [row for row in answer["tenants"] if row["salt"] == salt]
    (row,) = [row for row in rows if salt is not None or not row["tenant"]]
    found: dict[str, Any] = row
    return found


def settings(tmp_path: Path, **more: object) -> dict[str, object]:
    return {"quota.file": tmp_path / "quotas.toml", **more}


@pytest.mark.slow
def test_a_limit_holds_at_once_and_over_a_restart(tmp_path: Path, kvkeep: Command) -> None:
    l2 = f"fs://{tmp_path}/l2?capacity=32MiB&name=disk"
    with (
        running_server(tmp_path, settings=settings(tmp_path), l2=l2) as server,
        Session(server.socket, "q", CHUNK_BYTES) as session,
    ):
        at = ("--socket", server.socket, "--json")
        done = kvkeep("quota", "set", "tenant-a", "--l1", "256KiB", "--l2", "25%", *at)
        assert done.code == 0
        assert done.json["kept"] is True
        assert tomllib.loads((tmp_path / "quotas.toml").read_text()) == {
            "tenant-a": {"l1": "256KiB", "l2": "25%"}
        }
        for number in range(7):
            store_soon(session, "tenant-a", number)
            store_soon(session, None, number)
        assert kvkeep("wait-persisted", "--socket", server.socket).code in (0, 1)
        _check_listed(kvkeep("quota", *at).json, disk_used=True)
        assert kvkeep("quota", "set", "", "--l1", "50%", *at).code == 0  # without a salt
    with running_server(tmp_path, settings=settings(tmp_path), l2=l2) as server:
        server.wait_for("l2_scanned")
        answer = kvkeep("quota", "--socket", server.socket, "--json").json
        row = tenant(answer, "tenant-a")
        assert (row["l1"]["limit"], row["l1"]["from"]) == ("256KiB", "own")
        assert row["l2"][0]["limit_bytes"] == 8 << 20
        assert row["l2"][0]["used_bytes"] > 0  # counted again by the scan
        assert tenant(answer, None)["l1"]["limit"] == "50%"
        with Session(server.socket, "q2", CHUNK_BYTES) as session:
            for number in range(7):
                store_soon(session, "tenant-a", number)
        answer = kvkeep("quota", "--socket", server.socket, "--json").json
        assert tenant(answer, "tenant-a")["l1"]["used_bytes"] == 4 * CHUNK_BYTES


def _check_listed(answer: dict[str, Any], *, disk_used: bool) -> None:
    row = tenant(answer, "tenant-a")
    assert row["tenant"] == digest_of("tenant-a")
    assert row["l1"]["used_bytes"] == row["l1"]["limit_bytes"] == 4 * CHUNK_BYTES
    assert (row["l1"]["evicted"], row["l1"]["refused"]) == (3, 0)
    assert row["l2"][0]["backend"] == "disk"
    assert (row["l2"][0]["used_bytes"] > 0) == disk_used
    none = tenant(answer, None)
    assert none["tenant"] == ""
    assert none["l1"]["used_bytes"] == 7 * CHUNK_BYTES
    assert none["l1"]["from"] == "default"
    assert answer["default"] == {"l1": "100%", "l2": "100%"}
    assert answer["backends"] == [{"name": "disk", "keeps_quotas": True}]
    assert answer["left_out"] == 0


def test_refusals_are_counted_by_digest(tmp_path: Path, kvkeep: Command) -> None:
    with (
        running_server(tmp_path, settings={"quota.default_l1": "128KiB"}) as server,
        Session(server.socket, "q", CHUNK_BYTES) as session,
    ):
        done = kvkeep("quota", "set", "t", "--l1", "0", "--socket", server.socket)
        assert "applied, not kept: set quota.file" in done.out
        assert store(session, "t", range(2)) == [OVER, OVER]
        assert store(session, "unknown", range(4)) == [GRANTED] * 4  # the default, not nothing
        answer = kvkeep("quota", "--socket", server.socket, "--json").json
        assert tenant(answer, "unknown")["l1"]["used_bytes"] == 2 * CHUNK_BYTES
        assert tenant(answer, "t")["l1"]["refused"] == 2
        table = kvkeep("quota", "--socket", server.socket).out
        for words in ("unknown", "128KiB by default", "128KiB of L1, 100% of each L2 backend"):
            assert words in table
        assert "limits end with the server" in table
        text = server.get("/metrics")[1]
        label = f'backend="",tenant="{digest_of("t")}",tier="l1"'
        assert f"kvkeep_quota_refused_total{{{label}}} 2.0" in text
        assert 'kvkeep_stage_chunks_total{outcome="over_quota"} 2.0' in text
        assert "unknown" not in text  # names are for operators only
        assert "unknown" not in json.dumps(server.status())
        gone = kvkeep("quota", "unset", "t", "--socket", server.socket)
        assert "128KiB by default" in gone.out
        assert store(session, "t", range(2)) == [GRANTED, GRANTED]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("quota")
    with running_server(folder, settings={"quota.file": folder / "quotas.toml"}) as server:
        yield server


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("set", "t"), "say how much: --l1, --l2 or both"),
        (("set", "t", "--l1", "much"), "l1 = 'much': write a share such as 25%"),
        (("set", "t", "--l1", "120%"), "a share is at least 0.001% and at most 100%"),
        (("set", "t", "--l1", "10"), "write 10%, or 10GiB"),
        (("set", "t", "--l2", "10%"), "this server has no L2 that could be limited"),
        (("set", "x" * 1_025, "--l1", "1%"), "1025 characters is too long"),
        (("unset", "nobody"), '"nobody" has no limit of its own: see kvkeep quota'),
        (("set", "\udcff", "--l1", "1%"), "is not UTF-8"),
    ],
)
def test_a_wrong_order_changes_nothing(
    served: Server, kvkeep: Command, arguments: tuple[str, ...], text: str
) -> None:
    done = kvkeep("quota", *arguments, "--socket", served.socket)
    assert text in done.sentence
    assert kvkeep("quota", "--socket", served.socket, "--json").json["tenants"] == []


def test_options_before_the_word_are_refused(served: Server, kvkeep: Command) -> None:
    done = kvkeep("quota", "--socket", served.socket, "set", "t", "--l1", "1%")
    assert "write options behind the last word" in done.sentence


def test_a_strange_name_survives(served: Server, tmp_path: Path, kvkeep: Command) -> None:
    name = 'q"\\ \x7f\té 🐘 [x] #'
    at = ("--socket", served.socket, "--json")
    done = kvkeep("quota", "set", name, "--l1", "1GiB", *at)
    file = Path(done.json["file"])
    assert tomllib.loads(file.read_text()) == {name: {"l1": "1GiB"}}
    assert file.stat().st_mode & 0o777 == 0o600
    assert tenant(kvkeep("quota", *at).json, name)["l1"]["from"] == "own"
    assert kvkeep("quota", "unset", name, *at).code == 0
    assert tomllib.loads(file.read_text()) == {}
    assert [path.name for path in file.parent.glob("quotas*")] == ["quotas.toml"]


@pytest.mark.slow
def test_a_file_that_cannot_be_written(tmp_path: Path, kvkeep: Command) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    with running_server(tmp_path, settings={"quota.file": place / "quotas.toml"}) as server:
        place.rmdir()
        done = kvkeep("quota", "set", "t", "--l1", "0", "--socket", server.socket)
        assert "cannot be written (No such file or directory): nothing was changed" in done.sentence
        assert kvkeep("quota", "--socket", server.socket, "--json").json["tenants"] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "is not valid TOML"),
        ('["a"]\nl1 = "much"', "\"a\": l1 = 'much': write a share such as 25%"),
        ('["a"]\nl3 = "1%"', "'l3' of \"a\" is not l1 or l2"),
        ('["a"]\nl1 = 0.1', "l1 must be a text such as '10%'"),
        ('["a"]\nl1 = 5', "l1 = '5': 5 has no unit and is hardly bytes; write 5%, or 5GiB"),
        ('a = "10%"', 'write ["a"] on a line of its own'),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        QuotaBook(QuotaConfig(file=str(file)))
    assert f"the quota file {file}" in str(raised.value)
    assert why in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a regular file"):
        QuotaBook(QuotaConfig(file=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"that does not exist: mkdir -p {tmp_path}/no$"):
        QuotaBook(QuotaConfig(file=str(tmp_path / "no" / "quotas.toml")))
    assert QuotaBook(QuotaConfig(file=str(tmp_path / "not yet"))).own == {}


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text('["a"]\nl1 = "1%"')
    for mode in (0o664, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*: chmod go-w {file}$"):
            QuotaBook(QuotaConfig(file=str(file)))
    file.chmod(0o644)
    assert list(QuotaBook(QuotaConfig(file=str(file))).own) == ["a"]


@pytest.mark.slow
def test_a_server_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[")
    done = run_kvkeep(
        "serve", "--socket", tmp_path / "s", "--no-http", "--set", f"quota.file={file}"
    )
    assert done.returncode == 1
    assert f"kvkeep: the quota file {file} is not valid TOML" in done.stderr
    assert "Traceback" not in done.stderr
