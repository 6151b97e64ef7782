"""`kvkeep doctor` on L2: URLs that cannot be read, directories that cannot be used."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.backends.fs_cases import opened, put

from kvkeep.config import L2Config, QuotaConfig
from kvkeep.doctor import Check, Status
from kvkeep.doctor.storage import check_quotas, check_storage


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


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may enter every directory: be nobody meanwhile."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_place_below_a_directory_that_may_not_be_entered(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        with as_somebody_else():
            at_the_door, inside = check(f"fs://{closed}/l2 fs://{closed}/a/b?name=b")
    finally:
        closed.chmod(0o700)
    for found in (at_the_door, inside):
        assert found.status is Status.FAIL
        assert "cannot be looked at: Permission denied" in found.detail
        assert "let this user enter it" in found.fix


@pytest.mark.parametrize("below", ["", "/l2", "/a/b"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    (found,) = check(f"fs://{tmp_path}/file{below}")
    assert found.status is Status.FAIL
    assert str(tmp_path / "file") in found.detail
    assert "not a directory" in found.detail.lower()


def test_a_read_only_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os, "statvfs", lambda _: os.statvfs_result((*real[:8], real.f_flag | os.ST_RDONLY, 255))
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    for found in check(f"fs://{tmp_path} fs://{tmp_path}/new?name=b"):
        assert found.status is Status.FAIL
        assert "read-only" in found.detail
        assert found.fix == "mount it writable"


def test_links_and_two_on_one_directory(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "up").symlink_to(".")
    (tmp_path / "nothing").symlink_to("gone")
    (found,) = check(f"fs://{tmp_path}/nothing")
    assert found.status is Status.FAIL
    assert "a link to nothing" in found.detail
    for one, two in (("there", "link"), ("new", "up/new")):
        first, second = check(f"fs://{tmp_path}/{one} fs://{tmp_path}/{two}?name=b")
        assert first.status is Status.OK
        assert second.status is Status.FAIL
        assert f"{tmp_path}/{two} is the directory of fs too" in second.detail
    (found,) = check(f"fs://{tmp_path}/there fs://{tmp_path}/./there/?name=b")
    assert found.status is Status.FAIL
    assert "is the same place as" in found.detail


def test_somebody_elses_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lock").touch()
    (found,) = check(f"fs://{tmp_path}")
    assert found.status is Status.OK
    (tmp_path / "thesis.tex").write_text("precious")
    (found,) = check(f"fs://{tmp_path}")
    assert found.status is Status.FAIL
    assert f"{tmp_path} is not empty and not an L2 of kvkeep" in found.detail
    assert "empty directory" in found.fix


def test_an_l2_and_what_is_inside_of_it(tmp_path: Path) -> None:
    async def fill() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1, 2)

    asyncio.run(fill())
    whole, inside, deeper = check(
        f"fs://{tmp_path}/l2 fs://{tmp_path}/l2/x?name=x fs://{tmp_path}/l2/tmp?name=y"
    )
    assert whole.status is Status.OK
    assert inside.status is deeper.status is Status.FAIL
    assert f"inside of {tmp_path}/l2, which is an L2 itself" in inside.detail
    (tmp_path / "l2" / "kvkeep.json").write_text('{"id": "x"}')
    (changed,) = check(f"fs://{tmp_path}/l2")
    assert changed.status is Status.FAIL
    assert f"{tmp_path}/l2/kvkeep.json" in changed.detail
    assert "another directory" in changed.fix


def test_what_is_there_already_is_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1, 2, 3)

    asyncio.run(fill())
    stored_bytes = sum(path.stat().st_blocks for path in tmp_path.rglob("*.kv")) * 512
    real = os.statvfs(tmp_path)
    free_blocks = (63 << 20) // real.f_frsize  # and 64 MiB is its capacity
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: os.statvfs_result((*real[:3], free_blocks, free_blocks, *real[5:10])),
    )
    (found,) = check(f"fs://{tmp_path}/l2")  # the capacity that the directory remembers
    assert found.status is Status.WARN
    assert "may take 64MiB" in found.detail
    (found,) = check(f"fs://{tmp_path}/l2?capacity={(63 << 20) + stored_bytes}")
    assert found.status is Status.OK
    (found,) = check(f"fs://{tmp_path}/l2?capacity={(63 << 20) + (1 << 20)}")
    assert found.status is Status.WARN
    (found,) = check(f"fs://{tmp_path}/l2?capacity=63MiB")
    assert found.status is Status.OK


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    (found,) = check(f"fs://{tmp_path}/new?capacity=9999TiB")
    assert found.status is Status.WARN
    assert "capacity" in found.fix


def test_a_quota_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quotas.toml"

    def found() -> Check:
        (only,) = check_quotas(QuotaConfig(file=str(file)))
        return only

    assert not list(check_quotas(QuotaConfig()))
    assert found().status is Status.OK
    assert not file.exists(), "a check changes nothing"
    file.write_text('["a"]\nl1 = "10%"')
    assert (found().status, found().detail) == (Status.OK, f"{file}: 1 with limits of their own")
    file.chmod(0o666)
    assert (found().status, found().fix) == (Status.FAIL, f"chmod go-w {file}")
    file.chmod(0o600)
    file.write_text("[")
    assert "not valid TOML" in found().detail
    file.write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert found().status is Status.WARN
    file.unlink()
    assert found().status is Status.FAIL
    assert "kvkeep quota set cannot write it" in found().detail
    file = tmp_path / "no" / "quotas.toml"
    assert found().fix == f"mkdir -p {tmp_path}/no"
