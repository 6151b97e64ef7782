"""Doctor: each branch against real sockets, directories, ports and package metadata.

Another user is really another user when the tests run as root (by the effective user id, which is
what the kernel looks at for files and sockets); otherwise the same answers are had from mode 000.
"""

import errno
import fcntl
import json
import os
import platform
import pwd
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvkeep.config import Config, HttpConfig, L1Config, LimitsConfig, SocketConfig
from kvkeep.doctor import Check, Installed, Status, run_checks, worst
from kvkeep.doctor.kernel import Feature, check_features, check_kernel
from kvkeep.doctor.memory import check_memory, check_open_files
from kvkeep.doctor.sockets import check_directory, check_socket, is_somebody_serving
from kvkeep.limits import MemoryBudget

NOBODY = 65534
GIB = 1 << 30
BUDGET = MemoryBudget(8 * GIB, "RAM", 4 * GIB, "MemAvailable", 0)
INSTALLED = Installed("0.32.0", has_plugin=True, plugin_filter=None)
GROUP = str(os.getegid())  # a group this process is in, by number: names differ between machines


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users may enter too (`tmp_path` is below one they may not)."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def another_user() -> Iterator[None]:
    """Act as nobody; the process stays root underneath."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextmanager
def serving(path: Path, *, backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(backlog)
        yield server


def private_dir(parent: Path, name: str = "kvkeep") -> Path:
    folder = parent / name
    folder.mkdir(mode=0o700)
    return folder


def at(folder: Path, group: str = "") -> SocketConfig:
    return SocketConfig(path=str(folder / "k.sock"), group=group)


# --- the whole ---


def test_run_checks_on_this_machine(place: Path) -> None:
    config = Config(
        socket=at(private_dir(place)), l1=L1Config(size="64MiB"), http=HttpConfig(port=0)
    )
    checks = run_checks(config, installed=INSTALLED, budget=BUDGET)
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    for wanted in ("kernel", "memory", "L1 size", "open files", "socket directory", "socket"):
        assert wanted in names
    for wanted in ("HTTP", "vLLM", "vLLM plugin", "engine flag"):
        assert wanted in names
    failed = [check for check in checks if check.status is Status.FAIL]
    assert failed == []
    assert all(check.fix for check in checks if check.status is not Status.OK)
    assert msgspec.json.decode(msgspec.json.encode(checks), type=list[Check]) == checks


def test_run_checks_reads_what_is_not_given(place: Path) -> None:
    config = Config(socket=at(place), l1=L1Config(size="1000TiB"), http=HttpConfig(port=0))
    bad_flag = json.dumps({"kv_connector": "KVKeepConnector", "kv_role": "kv_both"})
    by_name = {each.name: each for each in run_checks(config, kv_transfer_config=bad_flag)}
    assert by_name["L1 size"].status is Status.FAIL
    assert by_name["engine flag"].status is Status.FAIL
    assert worst(list(by_name.values())) is Status.FAIL


def test_worst() -> None:
    ok, warn = Check("a", Status.OK, ""), Check("b", Status.WARN, "", "x")
    assert worst([]) is Status.OK
    assert worst([ok, warn, ok]) is Status.WARN
    assert worst([warn, Check("c", Status.FAIL, "", "x"), ok]) is Status.FAIL


# --- kernel ---


def test_kernel_is_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernel().status is Status.OK
    assert platform.release() in check_kernel().detail
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert check_kernel().status is Status.FAIL


def test_the_probes_agree_with_what_the_kernel_version_promises() -> None:
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    by_name = {check.name: check.status for check in check_features()}
    assert by_name["memfd_create with seals"] is Status.OK
    assert by_name["MADV_DONTFORK"] is Status.OK
    for name, since in (("MADV_POPULATE_WRITE", (5, 14)), ("SO_PEERPIDFD", (6, 5))):
        if version < since:
            assert by_name[name] is Status.WARN


def test_a_probe_leaves_no_descriptor_behind() -> None:
    check_features()
    before = len(os.listdir("/proc/self/fd"))
    check_features()
    assert len(os.listdir("/proc/self/fd")) <= before


def feature(name: str, *, works: bool, if_absent: Status = Status.WARN) -> Feature:
    def probe() -> None:
        if not works:
            raise OSError(errno.ENOSYS, "Function not implemented")

    return Feature(name, probe, if_absent, "it costs", "do this")


def test_an_absent_feature_names_its_cost_and_fix() -> None:
    (check,) = check_features([feature("x", works=False, if_absent=Status.FAIL)])
    assert check.status is Status.FAIL
    assert "Function not implemented" in check.detail
    assert "it costs" in check.detail
    assert check.fix == "do this"


@pytest.mark.parametrize(
    ("opens", "peer", "status"),
    [
        (True, True, Status.OK),
        (True, False, Status.WARN),
        (False, True, Status.WARN),
        (False, False, Status.FAIL),
    ],
)
def test_without_any_pidfd_nobody_may_write(opens: bool, peer: bool, status: Status) -> None:
    features = [feature("pidfd_open", works=opens), feature("SO_PEERPIDFD", works=peer)]
    assert worst(check_features(features)) is status


def test_seals_that_do_not_hold_are_no_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
    by_name = {check.name: check for check in check_features()}
    assert by_name["memfd_create with seals"].status is Status.FAIL
    assert "do not hold" in by_name["memfd_create with seals"].detail


# --- memory, nodes, descriptors ---


def test_memory_fits() -> None:
    memory, size, _ = check_memory(Config(l1=L1Config(size="25%")), BUDGET)
    assert (memory.status, size.status) == (Status.OK, Status.OK)
    assert "8GiB by RAM" in memory.detail
    assert "2GiB" in size.detail


def test_l1_larger_than_free_memory() -> None:
    _, size = check_memory(Config(l1=L1Config(size="100%")), BUDGET)
    assert size.status is Status.FAIL
    assert "4GiB free now" in size.detail
    assert size.fix == "set l1.size to 4096MiB or less, free memory, or raise the limit"


def test_memory_of_a_machine_without_proc(tmp_path: Path) -> None:
    (check,) = check_memory(Config(), root=tmp_path)
    assert check.status is Status.FAIL
    assert check.fix == "mount /proc"


@pytest.mark.parametrize(
    ("online", "wanted", "status"),
    [("0-1", "0-1", Status.OK), ("0-1", "0,3", Status.FAIL), (None, "1", Status.FAIL)],
)
def test_numa_nodes(tmp_path: Path, online: str | None, wanted: str, status: Status) -> None:
    if online is not None:
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True)
        (folder / "online").write_text(online + "\n")
    config = Config(l1=L1Config(size="4MiB", numa=wanted))
    *_, check = check_memory(config, BUDGET, root=tmp_path)
    assert (check.name, check.status) == ("NUMA nodes", status)


@pytest.mark.parametrize(
    ("limit", "status", "fix"),
    [
        ((4096, 4096), Status.OK, ""),
        ((-1, -1), Status.OK, ""),
        ((1024, 4096), Status.WARN, "ulimit -n 2112"),
        ((1024, -1), Status.WARN, "ulimit -n 2112"),
        ((1024, 1024), Status.WARN, "limits.max_connections=480"),
    ],
)
def test_open_files(limit: tuple[int, int], status: Status, fix: str) -> None:
    check = check_open_files(Config(), limit)
    assert check.status is status
    assert fix in check.fix
    assert bool(check.fix) == bool(fix)


def test_the_number_of_connections_it_names_is_enough() -> None:
    fewer = Config(limits=LimitsConfig(max_connections=480))
    assert check_open_files(fewer, (1024, 1024)).status is Status.OK
    assert check_open_files(Config()).name == "open files"


# --- the socket's directory ---


def test_a_directory_of_ours(place: Path) -> None:
    check = check_directory(at(private_dir(place)))
    assert check.status is Status.OK
    assert "mode 0700" in check.detail


def test_a_directory_that_can_be_made(place: Path) -> None:
    check = check_directory(at(place / "a" / "b"))
    assert check.status is Status.OK
    assert "is made by" in check.detail
    assert not (place / "a").exists(), "a check changes nothing"


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_where_the_directory_should_be(place: Path, below: str) -> None:
    (place / "file").write_text("")
    check = check_directory(at(place / "file" / below))
    assert check.status is Status.FAIL
    assert f"{place / 'file'} is a file, not a directory" in check.detail
    assert f"remove or rename {place / 'file'}" in check.fix


def test_a_link_to_nowhere(place: Path) -> None:
    (place / "link").symlink_to(place / "nowhere")
    check = check_directory(at(place / "link"))
    assert check.status is Status.FAIL
    assert "does not exist" in check.detail


def test_a_path_too_long_for_a_socket() -> None:
    config = SocketConfig(path="/tmp/" + "x" * 120)
    check = check_directory(config)
    assert check.status is Status.FAIL
    assert "a unix socket allows 107" in check.detail
    assert check_socket(config).status is Status.FAIL
    assert not is_somebody_serving(config.path)


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        (0o755, Status.WARN),
        (0o710, Status.WARN),
        (0o770, Status.FAIL),
        (0o702, Status.FAIL),
    ],
)
def test_a_directory_open_to_others(place: Path, mode: int, status: Status) -> None:
    folder = private_dir(place)
    folder.chmod(mode)
    check = check_directory(at(folder))
    assert check.status is status
    assert check.fix == f"chmod 700 {folder}"


def test_a_directory_shared_by_all_is_left_as_it_is(place: Path) -> None:
    folder = private_dir(place)
    folder.chmod(0o1777)
    check = check_directory(at(folder))
    assert check.status is Status.FAIL
    assert "chmod" not in check.fix
    assert f"{folder}/kvkeep/kvkeep.sock" in check.fix


def test_a_directory_for_a_group(place: Path) -> None:
    folder = private_dir(place)
    check = check_directory(at(folder, GROUP))
    assert check.status is Status.WARN
    assert check.fix == f"chgrp {GROUP} {folder} && chmod 750 {folder}"
    os.chown(folder, -1, int(GROUP))
    folder.chmod(0o750)
    assert check_directory(at(folder, GROUP)).status is Status.OK
    folder.chmod(0o755)
    assert check_directory(at(folder, GROUP)).status is Status.WARN
    assert "no group here" in check_directory(at(folder, "no-such-group")).detail


def test_a_directory_of_another_user(place: Path) -> None:
    folder = private_dir(place)
    if os.geteuid() != 0:
        folder.chmod(0o000)
        assert check_directory(at(folder)).status is Status.FAIL
        assert check_directory(at(folder / "below")).status is Status.FAIL
        folder.chmod(0o700)
        return
    with another_user():
        check = check_directory(at(folder))
        hidden = check_directory(at(folder / "below"))
        unmakeable = check_directory(at(place / "new"))
    assert check.status is Status.FAIL
    assert "belongs to another user" in check.detail
    assert hidden.status is Status.FAIL
    assert "Permission denied" in hidden.detail
    assert unmakeable.status is Status.FAIL
    assert unmakeable.fix.startswith("sudo install -d -m 0700 -o ")


def test_a_user_without_a_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    assert f"owner uid {os.geteuid()}," in check_directory(at(private_dir(place))).detail


def test_a_directory_of_ours_that_we_may_not_write(place: Path) -> None:
    folder = private_dir(place)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        folder.chmod(0o500)
        with another_user():
            check = check_directory(at(folder))
    else:
        folder.chmod(0o500)
        check = check_directory(at(folder))
    assert check.status is Status.FAIL
    assert "is not writable" in check.detail


# --- the socket ---


def test_nothing_there(place: Path) -> None:
    assert "is free" in check_socket(at(place)).detail
    assert check_socket(at(place / "no" / "where")).status is Status.OK
    assert not is_somebody_serving(at(place).path)


def test_a_socket_that_was_left_over(place: Path) -> None:
    with serving(place / "k.sock"):
        pass
    check = check_socket(at(place))
    assert check.status is Status.OK
    assert "left over" in check.detail
    assert not is_somebody_serving(at(place).path)


def test_a_server_that_does_not_accept(place: Path) -> None:
    with serving(place / "k.sock", backlog=0), socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(place / "k.sock"))
        check = check_socket(at(place))
        assert is_somebody_serving(at(place).path)
    assert check.status is Status.WARN
    assert "does not accept" in check.detail


def test_a_file_where_the_socket_should_be(place: Path) -> None:
    (place / "k.sock").write_text("")
    check = check_socket(at(place))
    assert check.status is Status.FAIL
    assert check.fix.startswith(f"remove or rename {place / 'k.sock'}")


def test_a_datagram_socket_of_something_else(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(place / "k.sock"))
        check = check_socket(at(place))
    assert check.status is Status.FAIL
    assert "cannot connect" in check.detail


def test_the_socket_of_another_user(place: Path) -> None:
    path = place / "k.sock"
    with serving(path):
        if os.geteuid() != 0:
            path.chmod(0o000)
            assert "cannot connect" in check_socket(at(place)).detail
            return
        path.chmod(0o666)
        with another_user():
            as_nobody = check_socket(at(place))
            in_group = check_socket(at(place, str(NOBODY)))  # nothing answers: only the right
            path_of_root = private_dir_of_root(place)
            hidden = check_socket(at(path_of_root))
    assert as_nobody.status is Status.FAIL
    assert "belongs to another user, root" in as_nobody.detail
    assert as_nobody.fix.startswith("run as root")
    assert "does not answer" in in_group.detail, "one shared with a group of ours is meant for us"
    assert hidden.status is Status.FAIL
    assert "cannot be reached" in hidden.detail


def private_dir_of_root(place: Path) -> Path:
    os.seteuid(0)
    try:
        return private_dir(place, "root-only")
    finally:
        os.seteuid(NOBODY)


@pytest.mark.slow
def test_a_socket_file_of_ours_served_by_another_user(place: Path) -> None:
    path = place / "k.sock"
    if os.geteuid() != 0:
        with serving(path):
            assert "does not answer" in check_socket(at(place)).detail
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        with another_user():
            server.listen(8)
        check = check_socket(at(place))
        shared = check_socket(at(place, GROUP))
    assert check.status is Status.FAIL
    assert "is served by another user" in check.detail
    assert "does not answer" in shared.detail
