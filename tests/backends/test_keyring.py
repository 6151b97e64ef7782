"""The key file: what is read, what is refused with its fix, and how a new key comes in."""

import base64
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.backends.header import KEY_CHECK_BYTES
from kvkeep.backends.keyring import MOST_KEYS, Key, load_keys, new_key, read_private
from kvkeep.errors import ConfigError


def text_of(byte: int, name: str = "k") -> str:
    return f"{name}{byte} {base64.b64encode(bytes([byte]) * 32).decode()}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "l2.keys"
    path.touch(0o600)
    return path


def test_the_first_key_encrypts_and_all_are_found(file: Path) -> None:
    file.write_text(f"# mine\n\n  {text_of(1)}{text_of(2)}")
    keyring = load_keys(str(file))
    assert [key.id for key in keyring.keys] == ["k1", "k2"]
    assert keyring.active.id == "k1"
    for key in keyring.keys:
        assert len(key.check) == KEY_CHECK_BYTES
        assert keyring.find(key.check) == key
    assert keyring.find(bytes(KEY_CHECK_BYTES)) is None


def test_a_key_is_known_by_itself_not_by_its_name() -> None:
    assert Key("a", bytes(32)).check == Key("b", bytes(32)).check
    assert Key("a", bytes(32)).check != Key("a", b"\1" * 32).check


def test_no_text_of_a_key_shows_it(file: Path) -> None:
    file.write_text(text_of(7))
    shown = repr(load_keys(str(file)).active)
    assert shown == "Key(id='k7')"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        ("k1\n", "1 words instead of 2"),
        ("k1 a b\n", "3 words"),
        ("../k QUJD\n", "no name"),
        (f"{'k' * 33} QUJD\n", "no name"),
        ("k1 %%%\n", "no base64"),
        ("k1 QUJD\n", "the key has 3 bytes"),
        (text_of(1) + text_of(1), "line 2: a key of this name"),
        (text_of(1) + text_of(1, "other"), "another name"),
        ("".join(text_of(n) for n in range(MOST_KEYS + 1)), f"line {MOST_KEYS + 1}: more than"),
        ("#" * (1 << 16) + text_of(1), "larger than"),
    ],
)
def test_what_is_no_key_file_is_refused(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as refusal:
        load_keys(str(file))
    for secret in ("QUJD", "AQEB"):
        assert secret not in str(refusal.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_refused(data: bytes) -> None:
    fd = os.memfd_create("keys")
    try:
        os.write(fd, data)
        os.fchmod(fd, 0o600)
        load_keys(f"/proc/self/fd/{fd}")
    except ConfigError:
        pass
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.write_text(text_of(1))
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600 {file}"):
        load_keys(str(file))
    file.chmod(0o400)
    assert load_keys(str(file)).active.id == "k1"


def test_a_file_of_somebody_else_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(text_of(1))
    monkeypatch.setattr(os, "geteuid", lambda: 4_242)
    mine = file.stat().st_uid == 0  # root's files serve everybody
    if mine:
        os.chown(file, 4_243, -1)
    with pytest.raises(ConfigError, match=r"another user.*chown 4242"):
        load_keys(str(file))


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=str(path)):
        read_private(str(path), "l2.key_file")


# ---- new keys


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277])
def umask(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_new_file_is_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "keys"
    before = os.umask(umask)
    try:
        keyring = new_key(str(path), "first")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(str(path)).active == keyring.active == keyring.keys[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"]


def test_a_new_key_comes_first_and_all_else_stays(file: Path) -> None:
    file.write_text(f"# by hand\n{text_of(1)}# the old one\n{text_of(2)}")
    before = file.read_text()
    keyring = new_key(str(file))
    assert [key.id for key in keyring.keys][1:] == ["k1", "k2"]
    assert load_keys(str(file)).keys == keyring.keys
    lines = file.read_text().splitlines(keepends=True)
    assert lines.pop(1).startswith(keyring.active.id)
    assert "".join(lines) == before
    assert len(keyring.active.secret) == 32
    assert new_key(str(file)).active.secret != keyring.active.secret


def test_a_new_key_that_cannot_be_is_refused(file: Path, tmp_path: Path) -> None:
    file.write_text(text_of(1))
    for path, name, says in (
        (file, "k1", "already"),
        (file, "a b", "no name"),
        (tmp_path / "no" / "keys", "", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=says):
            new_key(str(path), name)
    assert file.read_text() == text_of(1)
    file.write_text("".join(text_of(n) for n in range(MOST_KEYS)))
    with pytest.raises(ConfigError, match=f"has {MOST_KEYS} keys"):
        new_key(str(file))
    file.write_text("broken\n")
    with pytest.raises(ConfigError, match="line 1"):
        new_key(str(file))


@pytest.mark.parametrize("text", ["", "\n", "# mine\n"])
def test_a_file_without_keys_gets_its_first_one(file: Path, text: str) -> None:
    file.write_text(text)
    keyring = new_key(str(file), "first")
    assert load_keys(str(file)).keys == keyring.keys
    assert len(keyring.keys) == 1
    assert text in file.read_text()


def test_of_keys_made_at_once_none_is_lost(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_key(str(file)).active.id, range(24)))
    assert sorted(key.id for key in load_keys(str(file)).keys) == sorted(made)


def test_a_directory_that_stays_locked_is_named(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.backends.keyring.LOCK_WAIT_S", 0.0)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"{tmp_path} is locked"):
            new_key(str(file))
    finally:
        os.close(fd)
    assert new_key(str(file), "k").active.id == "k"


def test_a_key_file_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key file is named"):
        new_key("")


def test_a_link_to_the_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.write_text(text_of(1))
    link = tmp_path / "link"
    link.symlink_to(file)
    new_key(str(link))
    assert link.is_symlink()
    assert len(load_keys(str(file)).keys) == 2
