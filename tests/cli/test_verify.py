"""kvkeep verify: finds every broken file, sets it aside when told, needs no server and no lock."""

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.backends.fs_cases import disk_usage, path_of, stored, wanted
from tests.cli.conftest import Command

from kvkeep.backends.fs_files import QUARANTINED_MOST
from kvkeep.cli import verify
from kvkeep.errors import BackendError, KVKeepError
from kvkeep.testing.backend_contract import OTHER, SALTED, SPACE, key, until
from kvkeep.types import IoOutcome

LENGTH = 10_000
OBJECTS = 6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with stored(tmp_path / "l2") as store:
            for space in (SPACE, SALTED):
                batch = [wanted(n, LENGTH, space=space, fill=True) for n in range(OBJECTS)]
                assert list(await store.put(batch)) == [IoOutcome.OK] * OBJECTS

    asyncio.run(fill())
    return tmp_path / "l2"


def scrub(root: Path, *, quarantine: bool = False) -> dict[str, str]:
    """Chunk number and space of each broken object, with the reason."""
    report = verify.scrub(f"fs://{root}", quarantine=quarantine, say=lambda text: None)
    names = {
        str(path_of(root, key(n), space).relative_to(root)): f"{n}{space.salt or ''}"
        for n in range(OBJECTS)
        for space in (SPACE, SALTED, OTHER)
    }
    return {names[row["path"]]: row["why"] for row in report.broken}


def damage(root: Path) -> dict[str, str]:
    """Damage half of what is there; what a scrub should say."""
    os.truncate(path_of(root, key(0)), 4_096 + LENGTH - 1)
    os.truncate(path_of(root, key(1)), 100)
    with path_of(root, key(2)).open("r+b") as file:
        file.seek(4_096 + 9_999)
        file.write(b"\0\0")
    with path_of(root, key(3)).open("r+b") as file:
        file.seek(300)
        file.write(b"\xff")
    shutil.copyfile(path_of(root, key(5)), path_of(root, key(4)))
    shutil.copyfile(path_of(root, key(1), SALTED), path_of(root, key(2), SALTED))
    return {
        "0": "truncated",
        "1": "truncated",
        "2": "too_long",
        "3": "header_checksum",
        "4": "wrong_key",
        "2s": "wrong_key",
    }


def test_a_sound_l2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.kv")}
    assert verify.run(str(root), as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("seconds") >= 0
    assert report == {
        "backend": "fs",
        "objects": 2 * OBJECTS,
        "bytes": 2 * OBJECTS * (4_096 + LENGTH),
        "broken": [],
        "not_moved": [],
        "foreign_files": 0,
        "unchecked": 0,
    }
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.kv")} == before


def test_everything_broken_is_found(root: Path) -> None:
    expected = damage(root)
    assert scrub(root) == expected
    assert scrub(root) == expected  # it changes nothing unless told


def test_a_payload_whose_bytes_changed(root: Path) -> None:
    with path_of(root, key(2)).open("r+b") as file:
        file.seek(4_096 + 77)
        old = file.read(1)
        file.seek(4_096 + 77)
        file.write(bytes([old[0] ^ 1]))
    assert scrub(root) == {"2": "payload_checksum"}


def test_what_is_broken_is_set_aside(root: Path) -> None:
    expected = damage(root)
    assert scrub(root, quarantine=True) == expected
    assert len(list((root / "quarantine").iterdir())) == len(expected) <= QUARANTINED_MOST
    assert scrub(root) == {}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system"),
        (BackendError("it has vanished"), "it has vanished"),
    ],
)
def test_what_cannot_be_set_aside_is_in_the_report(
    root: Path,
    kvkeep: Command,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    why: str,
) -> None:
    damage(root)

    def refuses(*_: object) -> None:
        raise error

    monkeypatch.setattr(verify, "set_aside", refuses)
    done = kvkeep("verify", root, "--quarantine", "--json")
    assert done.code == 1
    broken = [row["path"] for row in done.json["broken"]]
    assert len(broken) == 6
    assert done.json["not_moved"] == [{"path": path, "why": why} for path in broken]
    shown = kvkeep("verify", root, "--quarantine")
    assert shown.code == 1
    assert "6 broken, 6 could not be moved" in shown.out
    assert why in shown.out
    assert "header_checksum" in shown.out


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "no place is named"),
        (" ", "no place is named"),
        ("fs://", "absolute path"),
        ("fs://host/a", "absolute path"),
        ("fs:///a?oops=1", "oops is not an option"),
    ],
)
def test_no_place_is_not_the_working_directory(
    root: Path, kvkeep: Command, monkeypatch: pytest.MonkeyPatch, place: str, says: str
) -> None:
    monkeypatch.chdir(root)
    done = kvkeep("verify", place)
    assert done.code == 1
    assert says in done.sentence


def test_beside_a_running_server(root: Path) -> None:
    """The server reads the good ones, misses what was set aside, and counts it."""

    async def main() -> None:
        async with stored(root) as store:
            expected = damage(root)
            assert await asyncio.to_thread(scrub, root, quarantine=True) == expected
            for space in (SPACE, SALTED):
                batch = [wanted(n, LENGTH, space=space) for n in range(OBJECTS)]
                for n, outcome in enumerate(await store.get(batch)):
                    gone = f"{n}{space.salt or ''}" in expected
                    assert outcome is (IoOutcome.MISSING if gone else IoOutcome.OK)
            await until(lambda: store.usage().used_bytes == disk_usage(root))
            assert store.usage().quarantined_objects == len(expected)
            assert store.status()["corrupt"] == {}

    asyncio.run(main())


def test_foreign_files_are_counted(root: Path) -> None:
    (root / "README").write_text("x")
    path_of(root, key(1)).with_suffix(".bak").write_text("x")
    path_of(root, key(2)).unlink()
    path_of(root, key(2)).symlink_to("/etc/hostname")
    report = verify.scrub(str(root), quarantine=True, say=lambda text: None)
    assert report.foreign_files == 3
    assert not report.broken


def test_the_table_and_the_exit_code(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(root)
    assert verify.run(f"fs://{root}?name=disk") == 1
    out = capsys.readouterr().out
    assert "header_checksum" in out
    assert str(path_of(root, key(3)).relative_to(root)) in out
    assert "6 broken" in out


@pytest.mark.parametrize("what", ["missing", "empty", "redis://host"])
def test_what_is_no_l2_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    text = what if "://" in what else str(tmp_path / what)
    with pytest.raises(KVKeepError, match=r"kvkeep\.json|only fs"):
        verify.run(text)
