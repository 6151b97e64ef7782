"""`kvkeep doctor` on L2: URLs that cannot be read, directories that cannot be used."""

import os
from pathlib import Path

import pytest

from kvkeep.config import L2Config
from kvkeep.doctor import Check, Status
from kvkeep.doctor.storage import check_storage


def check(backends: str) -> list[Check]:
    return list(check_storage(L2Config(backends=backends)))


def test_none_is_fine() -> None:
    (found,) = check("")
    assert found.status is Status.OK
    assert "ends with the server" in found.detail


def test_a_directory_that_is_there_or_can_be_made(tmp_path: Path) -> None:
    there, made = check(f"fs://{tmp_path} fs://{tmp_path}/new?name=b&capacity=1MiB")
    assert there.status is made.status is Status.OK
    assert "free" in there.detail
    assert not (tmp_path / "new").exists(), "a check changes nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nfs:///a", "not a kind of L2"),
        ("fs:///a?capacty=1GiB", "capacty is not an option"),
        ("fs:///a fs:///b", "two have the name fs"),
    ],
)
def test_a_url_that_is_wrong(text: str, said: str) -> None:
    *_, found = check(text)
    assert found.status is Status.FAIL
    assert said in found.detail


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    (found,) = check(f"fs://{tmp_path}/a/b")
    assert found.status is Status.FAIL
    assert f"mkdir -p {tmp_path}/a/b" in found.fix


def test_a_place_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (found,) = check(f"fs://{tmp_path}")
    assert found.status is Status.FAIL
    assert "may not write" in found.detail


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    (found,) = check(f"fs://{tmp_path}/new?capacity=9999TiB")
    assert found.status is Status.WARN
    assert "capacity" in found.fix
