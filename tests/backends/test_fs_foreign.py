"""`fs` and what is not its own: refused at the start, never deleted, no link followed."""

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from tests.backends.fs_cases import LENGTH, has, opened, path_of, put, settings

from kvkeep.backends import fs_files, fs_identity
from kvkeep.backends.fs import FsBackend
from kvkeep.backends.fs_open import open_place
from kvkeep.backends.header import file_stem, label
from kvkeep.errors import BackendError
from kvkeep.testing.backend_contract import SPACE, filled, item, key

NAME = "0123456789abcdef"


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below, with the content of files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


async def _start(root: Path) -> None:
    async with opened(root):
        pass


def start(root: Path) -> None:
    asyncio.run(_start(root))


def refused(root: Path) -> str:
    """A start that is refused changes nothing; returns why."""
    before = tree(root)
    with pytest.raises(BackendError) as caught:
        start(root)
    assert tree(root) == before
    return str(caught.value)


# ---- somebody else's directory


def _cache(root: Path) -> None:
    for name in ("tmp", "quarantine", "trash-", f"trash-{NAME}"):
        (root / name).mkdir()
        (root / name / NAME).write_text("dear to somebody")


@pytest.mark.parametrize(
    "fill",
    [
        _cache,
        lambda root: (root / "tmp").mkdir(),
        lambda root: (root / "notes").write_text("x"),
        lambda root: (root / "lock").write_text("somebody's words, not a pid"),
        lambda root: (root / "lock").mkdir(),
        lambda root: (root / "lost+found").write_text("a file"),
        lambda root: (root / "kvkeep.json.bak").write_text("{}"),
        lambda root: (root / "quarantine").symlink_to("/nowhere"),
    ],
)
def test_a_directory_with_content_is_refused(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    root = tmp_path / "l2"
    root.mkdir()
    fill(root)
    assert refused(root) == (
        f"{root} is not empty and not an L2 of kvkeep: name a new or an empty directory"
    )


def test_what_does_not_count_as_content(tmp_path: Path) -> None:
    root = tmp_path / "l2"
    (root / "lost+found").mkdir(parents=True)
    (root / "lock").write_text("4711\n")
    (root / f"kvkeep.json.{NAME}").write_text('{"id"')  # a start that was killed
    start(root)
    assert {path.name for path in root.iterdir()} == {
        *("lost+found", "lock", "kvkeep.json", "tmp", "quarantine")
    }


@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync", "flock", "ftruncate"])
def test_a_first_start_that_dies_anywhere_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root = tmp_path / "l2"
    root.mkdir()

    class Killed(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"{'fcntl' if call == 'flock' else 'os'}.{call}", dies)
        if call in ("rename", "fsync"):
            patch.setattr(os, "unlink", dies)  # a dead process cleans nothing up
        with pytest.raises(Killed):
            open_place(root, capacity_bytes=1 << 20)
    left = {path.name for path in root.iterdir()}
    assert "kvkeep.json" in left or not left & {"tmp", "quarantine", "lock"}
    start(root)
    assert not list(root.glob("kvkeep.json.*"))


def test_one_l2_inside_of_another(tmp_path: Path) -> None:
    start(tmp_path / "l2")
    (tmp_path / "link").symlink_to(tmp_path / "l2" / "quarantine")
    for inside in (tmp_path / "l2" / "more", tmp_path / "link" / "a"):
        with pytest.raises(BackendError, match=f"{tmp_path}/l2, which is an L2 itself"):
            start(inside)
        assert not inside.exists()


# ---- kvkeep.json


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes -1, and it must be at least 1048576"),
        ({"capacity_bytes": (1 << 20) - 1}, "at least 1048576"),
        ({"capacity_bytes": 1 << 61}, "at most"),
        ({"capacity_bytes": 2.5e9 + 0.5}, "correct it"),
        ({"capacity_bytes": "1GiB"}, "correct it"),
        ({"version": 99}, "version 99, and this kvkeep knows 1"),
        ({"version": "1"}, "correct it"),
        ({"id": "../.."}, "16 hex digits"),
        ({"id": None}, "correct it"),
    ],
)
@pytest.mark.parametrize("given", [None, 64 << 20])
def test_an_unsound_identity_is_refused(
    tmp_path: Path, change: dict[str, object], says: str, given: int | None
) -> None:
    root = tmp_path / "l2"

    async def store() -> None:
        async with opened(root) as backend:
            await put(backend, 1, 2)

    asyncio.run(store())
    text = json.loads((root / "kvkeep.json").read_text())
    (root / "kvkeep.json").write_text(json.dumps(text | change))
    before = tree(root)
    with pytest.raises(BackendError, match=f"{root}/kvkeep.json.*{says}"):
        asyncio.run(FsBackend(settings(root, given)).open())
    assert tree(root) == before


@pytest.mark.parametrize("kind", ["link", "directory", "array"])
def test_an_identity_that_is_no_file_of_ours(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "l2"
    root.mkdir()
    if kind == "link":
        (tmp_path / "else.json").write_text(json.dumps({"id": NAME, "capacity_bytes": 1 << 30}))
        (root / "kvkeep.json").symlink_to(tmp_path / "else.json")
    elif kind == "directory":
        (root / "kvkeep.json").mkdir()
    else:
        (root / "kvkeep.json").write_text("[1]")
    assert "name another directory" in refused(root)


def test_a_disk_with_nothing_free_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_identity, "FREE_SHARE", 0.0)
    with pytest.raises(BackendError, match="which is too little: make room"):
        asyncio.run(FsBackend(settings(tmp_path / "l2", None)).open())


# ---- links


def _precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    folder.mkdir()
    for number in range(70):
        (folder / f"{number:016x}").write_text("x")
    aside = f"{label(SPACE)}_{file_stem(key(1))}.kv_01234567"
    (folder / aside).write_text("x")
    return folder


@pytest.mark.parametrize("name", ["tmp", "quarantine"])
@pytest.mark.parametrize("is_link", [True, False])
def test_own_directories_must_be_real(tmp_path: Path, name: str, is_link: bool) -> None:
    root, folder = tmp_path / "l2", _precious(tmp_path)
    start(root)
    (root / name).rmdir()
    if is_link:
        (root / name).symlink_to(folder)
    else:
        (root / name).write_text("x")
    before = tree(folder)
    assert f"{root}/{name} is a link or a file, and must be a directory" in refused(root)
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["tmp", "quarantine"])
def test_own_directories_that_become_links(tmp_path: Path, name: str) -> None:
    root, folder = tmp_path / "l2", _precious(tmp_path)
    before = tree(folder)

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
            (root / name).rmdir()
            (root / name).symlink_to(folder)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "tmp": partial(backend.put, [filled(SPACE, key(2), LENGTH)]),
                "quarantine": partial(backend.delete, SPACE, [key(1)], broken=True),
            }
            with pytest.raises(BackendError, match=f"{root}/{name} is a link or a file"):
                await calls[name]()

    asyncio.run(main())
    assert tree(folder) == before


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_running", [True, False])
def test_labels_and_shards_are_not_followed(tmp_path: Path, depth: int, is_running: bool) -> None:
    """What is behind a link is no object, and nothing is written there."""
    root, folder = tmp_path / "l2", tmp_path / "else"
    link = (path_of(root, key(1)).parents[1], path_of(root, key(1)).parent)[depth]

    def swap() -> None:
        link.rename(folder)
        link.symlink_to(folder)

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
            if is_running:
                swap()
                assert await backend.get([item(SPACE, key(1), LENGTH)]) == [0]
                await backend.delete(SPACE, [key(1)], broken=True)
        if not is_running:
            swap()
        before = tree(folder)
        async with opened(root) as backend:
            assert backend.usage().objects == 0
            await put(backend, 1)
            assert await has(backend, 1)
            await backend.forget(SPACE)
        assert tree(folder) == before

    asyncio.run(main())


# ---- what is deleted at start


def test_only_names_of_our_form_are_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "l2"
    stem = file_stem(key(1))
    shard, trash = stem[:2], f"trash-{NAME}"
    start(root)
    ours = [f"tmp/{NAME}", f"{trash}/{shard}/{stem}.kv", f"trash-{NAME[::-1]}/{shard}/{stem}.kv"]
    foreign = [
        "tmp/upload.part",
        f"tmp/{NAME}0",
        f"tmp/{NAME[1:]}a/deep",
        "quarantine/report.txt",
        "trash-0/x",
        f"trash-{NAME[1:]}/{shard}/{stem}.kv",
        f"{trash}/notes",
        f"{trash}/zz/{stem}.kv",
        f"{trash}/{shard}/{stem}.bak",
    ]
    for name in ours + foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / f"trash-{NAME[1:]}f").symlink_to(root / trash)
    caplog.set_level("INFO", "kvkeep.server.fs")
    caplog.clear()
    start(root)
    assert not any((root / name).exists() for name in ours)
    assert not (root / f"trash-{NAME[::-1]}").exists()
    assert all((root / name).read_text() == "x" for name in foreign)
    [scanned] = [record for record in caplog.records if record.message == "l2_scanned"]
    # Three in tmp, one in quarantine, two trashes of another form, one link, one trash that stays.
    assert scanned.fields["foreign"] == 8  # type: ignore[attr-defined]


def test_quarantine_is_trimmed_of_ours_alone(tmp_path: Path) -> None:
    root = tmp_path / "l2"
    start(root)
    ours = f"{label(SPACE)}_{file_stem(key(1))}.kv_"
    for _ in range(fs_files.QUARANTINED_MOST + 6):
        (root / "quarantine" / f"{ours}{secrets.token_hex(4)}").write_text("x")
    for number in range(70):
        (root / "quarantine" / f"{number}.txt").write_text("x")
        (root / "quarantine" / f"{ours}{number}").write_text("x")

    async def main() -> None:
        async with opened(root) as backend:
            assert backend.usage().quarantined_objects == fs_files.QUARANTINED_MOST
            assert backend.usage().used_bytes == fs_files.QUARANTINED_MOST * 4096

    asyncio.run(main())
    assert len(list((root / "quarantine").iterdir())) == fs_files.QUARANTINED_MOST + 140


# ---- what the refusals say


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file" / "l2", tmp_path / "file" / "a" / "l2"):
        with pytest.raises(BackendError, match=f"{tmp_path}/file is a file, not a directory"):
            start(root)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "l2").symlink_to(tmp_path / "nothing")
    with pytest.raises(BackendError, match="is a link to nothing: remove it"):
        start(tmp_path / "l2")


def test_an_error_at_open_names_the_file_and_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut(path: Path) -> bool:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "is_dir", shut)
    says = rf"{tmp_path}/l2 cannot be used: {tmp_path}/l2: Permission denied; let the server's user"
    with pytest.raises(BackendError, match=says):
        start(tmp_path / "l2")
