"""Modes and owners of everything that is made, under any umask; and where nothing is made."""

import asyncio
import grp
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.backends.fs_cases import LENGTH, opened, path_of, put
from tests.servers import running_server

from kvkeep.backends.keyring import new_key
from kvkeep.connectors.vllm.autostart import Start, ensure_server
from kvkeep.errors import SocketError
from kvkeep.server import quota_book
from kvkeep.server.endpoint import Endpoint
from kvkeep.testing.backend_contract import SPACE, key, until

UMASKS = (0o000, 0o022, 0o077, 0o007)


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(root: Path) -> list[str]:
    """All below the root, itself included, that another user may use in any way."""
    return [f"{path} {mode(path):04o}" for path in (root, *root.rglob("*")) if mode(path) & 0o077]


# ---- the socket


@pytest.mark.parametrize("mask", UMASKS)
def test_the_socket_is_ours_alone(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "a" / "b" / "k.sock"
    with masked(mask):
        endpoint = Endpoint(str(path))
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert mode(Path(f"{path}.lock")) == 0o600
    assert not mode(tmp_path / "a") & 0o022
    endpoint.close()


@pytest.mark.parametrize("mask", UMASKS)
def test_a_group_may_connect_but_not_replace(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "run" / "k.sock"
    group = grp.getgrgid(os.getegid()).gr_name
    with masked(mask):
        endpoint = Endpoint(str(path), group)
    assert (mode(path), mode(path.parent)) == (0o660, 0o750)
    assert path.lstat().st_gid == path.parent.stat().st_gid == os.getegid()
    assert mode(Path(f"{path}.lock")) == 0o600
    endpoint.close()


@pytest.mark.parametrize("shared", [0o777, 0o1777, 0o775, 0o702])
def test_a_directory_where_others_may_write_is_refused(tmp_path: Path, shared: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(shared)
    with pytest.raises(SocketError, match=f"{folder} has mode {shared:04o}.*chmod go-w"):
        Endpoint(str(folder / "k.sock"))
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    Endpoint(str(folder / "k.sock")).close()


def test_a_directory_in_one_where_all_may_write_is_refused(tmp_path: Path) -> None:
    """There anybody may rename it and put another in its place; a sticky one forbids that."""
    tmp_path.chmod(0o777)
    path = tmp_path / "run" / "k.sock"
    with pytest.raises(SocketError, match=f"in {tmp_path}, where all may write.*chmod o-w"):
        Endpoint(str(path))
    tmp_path.chmod(0o1777)
    Endpoint(str(path)).close()


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(SocketError, match=f"{tmp_path}/run is a link to {tmp_path}/real"):
        Endpoint(str(tmp_path / "run" / "k.sock"))
    assert list((tmp_path / "real").iterdir()) == []
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(SocketError, match="nowhere"):
        Endpoint(str(tmp_path / "nowhere" / "k.sock"))
    assert not (tmp_path / "gone").exists()


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    if os.geteuid() == 0:  # what is root's serves everybody
        os.chown(folder, 4_242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4_242)
    with pytest.raises(SocketError, match="belongs to another user"):
        Endpoint(str(folder / "k.sock"))
    assert list(folder.iterdir()) == []


# ---- L2


@pytest.mark.parametrize("mask", UMASKS)
def test_all_of_l2_is_ours_alone(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1, 2, 3)
            await backend.delete(SPACE, [key(2)], broken=True)
            await backend.delete(SPACE, [key(3)])
            await until(lambda: backend.usage().quarantined_objects == 1)

    with masked(mask):
        asyncio.run(main())
    assert path_of(root, key(1)).stat().st_size == 4_096 + LENGTH
    assert open_to_others(root) == []
    assert len(list((root / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("mask", UMASKS)
def test_the_files_that_name_tenants_and_keys_are_ours_alone(tmp_path: Path, mask: int) -> None:
    with masked(mask):
        new_key(str(tmp_path / "l2.keys"))
        quota_book.write(tmp_path / "quota.toml", "")
    assert [mode(path) for path in tmp_path.iterdir()] == [0o600, 0o600]


# ---- real processes


@pytest.mark.slow
def test_a_server_under_no_umask_at_all(tmp_path: Path) -> None:
    keys = tmp_path / "l2.keys"
    with masked(0):
        new_key(str(keys))
        l2 = f"fs://{tmp_path}/l2?capacity=1MiB"
        socket = str(tmp_path / "run" / "k.sock")
        with running_server(
            tmp_path, socket=socket, l2=l2, settings={"l2.key_file": keys}
        ) as server:
            assert server.status()["l2"][0]["encryption"]["keys"] == 1
            assert open_to_others(tmp_path / "l2") == []
            assert open_to_others(tmp_path / "run") == []
    assert mode(keys) == 0o600


@pytest.mark.slow
def test_what_autostart_leaves_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "above" / "run" / "k.sock"
    with masked(0):
        assert ensure_server(str(path), ("--l1-size", "16 apples")) is Start.FAILED
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "k.sock.autostart",
        "k.sock.log",
    ]
    assert open_to_others(path.parent) == []
    assert not mode(tmp_path / "above") & 0o022
