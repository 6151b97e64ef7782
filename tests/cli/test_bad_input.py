"""What people get wrong: one clear sentence with the fix, a non-zero exit, never a traceback."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.servers import kvkeep_command, kvkeep_env, run_kvkeep, running_server

from kvkeep.cli import FAILED, INTERRUPTED, WRONG_USAGE, main
from kvkeep.limits import memory_budget

NOBODY = 65534
# Modules are loaded before the user changes, who may not read this tree.
AS_NOBODY = """
import contextlib, io, os, sys
from kvkeep.cli import main
with contextlib.redirect_stderr(io.StringIO()):
    main(["status", "--socket", "/nonexistent/kvkeep.sock"])
    main(["serve", "--l1-size", "900TiB"])
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({uid}); os.setuid({uid})
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--l1size", "1GiB"], "--l1-size"),
        (["serv"], "serve"),
        (["serve", "--http-port", "many"], "--http-port"),
        (["serve", "--set", "l1.size"], "--set section.key=value"),
        (["serve", "--l1-size", "1GiB", "--set", "l1.size=2GiB"], "given twice"),
        (["serve", "--json", "--log-format", "text"], "contradict"),
        (["serve", "extra"], "extra"),
        (["serve", "--l2", "fs:///a", "--set", "l2.backends=fs:///b"], "given twice"),
        (["explain", "one", "two"], "two"),
        (["bench"], "Missing command"),
        (["bench", "object", "--shape", "70B"], "SmolLM2-135M"),
        (["bench", "object", "--tokens", "10"], "256"),
        (["simulate", "--seeds", "0"], "--seeds"),
    ],
)
def test_wrong_usage(kvkeep: Command, arguments: list[str], says: str) -> None:
    done = kvkeep(*arguments)
    assert done.code == WRONG_USAGE
    assert says in done.sentence
    assert "--help`" in done.sentence


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--l1-size", "lots"], "2GiB"),
        (["--hugepages", "1GiB"], "one of 2MiB, off"),
        (["--eviction", "random"], "lru"),
        (["--log-level", "loud"], "must be one of"),
        (["--http-port", "70000"], "65535"),
        (["--set", "l1.sise=1GiB"], "did you mean l1.size?"),
        (["--config", "/nonexistent/kvkeep.toml"], "does not exist"),
        (["--socket", "kvkeep.sock"], "must be absolute"),
        (["--socket", "/tmp/" + "x" * 120], "107"),
        (["--l1-size", "900TiB"], "set l1.size to"),
        (["--l1-size", "1MiB"], "4MiB"),
        (["--group", "no-such-group-here"], "no-such-group-here"),
        (["--no-http", "--l2", "nfs:///a", "--l2", "fs:///b"], "nfs is not a kind of L2"),
        (["--no-http", "--l2", "fs:///a", "--l2", "nfs:///b"], "nfs is not a kind of L2"),
        (["--no-http", "--l2", "fs:///a", "--l2", "fs:///a?name=b"], "the same place"),
    ],
)
def test_serve_refuses(kvkeep: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    path = [] if "--socket" in arguments else ["--socket", tmp_path / "run" / "kvkeep.sock"]
    size = [] if "--l1-size" in arguments else ["--l1-size", "8MiB"]
    done = kvkeep("serve", *path, *size, *arguments)
    assert done.code == FAILED
    assert says in done.sentence
    assert not (tmp_path / "run" / "kvkeep.sock").exists()


def test_more_l1_than_the_cgroup_allows(
    kvkeep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up container of 1 GiB on a host of 64 GiB."""
    files = {
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{1 << 30}\n",
        "sys/fs/cgroup/box/memory.current": f"{64 << 20}\n",
    }
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    budget = functools.partial(memory_budget, tmp_path)
    monkeypatch.setattr("kvkeep.server.run.memory_budget", budget)
    done = kvkeep("serve", "--socket", tmp_path / "kvkeep.sock", "--l1-size", "2GiB")
    assert done.code == FAILED
    assert "cgroup v2 /box memory.max" in done.sentence
    assert "set l1.size to 960MiB or less" in done.sentence


def test_a_file_where_the_directory_should_be(kvkeep: Command, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    path = tmp_path / "run" / "kvkeep.sock"
    served = kvkeep("serve", "--socket", path, "--l1-size", "8MiB")
    assert served.code == FAILED
    assert f"{tmp_path / 'run'} is a file" in served.sentence
    asked = kvkeep("status", "--socket", path)
    assert asked.code == FAILED
    assert str(path) in asked.sentence


def test_a_file_where_the_socket_should_be(kvkeep: Command, tmp_path: Path) -> None:
    path = tmp_path / "kvkeep.sock"
    path.write_text("precious")
    done = kvkeep("serve", "--socket", path, "--l1-size", "8MiB", "--no-http")
    assert done.code == FAILED
    assert "is not a socket" in done.sentence
    assert path.read_text() == "precious"


@pytest.mark.parametrize("command", ["status", "leases", "explain", "clear"])
def test_no_server(kvkeep: Command, tmp_path: Path, command: str) -> None:
    done = kvkeep(command, "--socket", tmp_path / "kvkeep.sock")
    assert done.code == FAILED
    assert "start one with kvkeep serve" in done.sentence


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status"], ["serve", "--l1-size", "8MiB", "--no-http"]])
def test_another_users_socket(tmp_path: Path, command: list[str]) -> None:
    """As root: asked as nobody. As anybody else: the socket's directory is closed."""
    with running_server(tmp_path, populated=False) as server:
        folder = Path(server.socket).parent
        code = AS_NOBODY.format(uid=NOBODY)
        folder.chmod(0o700 if os.geteuid() == 0 else 0)
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, *command, "--socket", server.socket],
                capture_output=True,
                text=True,
                timeout=30,
                env=kvkeep_env(),
            )
        finally:
            folder.chmod(0o700)
    assert done.returncode == FAILED
    assert done.stderr.startswith("kvkeep: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "user" in done.stderr


def test_help_and_version(kvkeep: Command) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        done = kvkeep(*arguments)
        assert done.code == 0
        for command in ("serve", "status", "explain", "doctor", "bench", "simulate", "demo"):
            assert command in done.out
    assert kvkeep("--version").out.startswith("kvkeep ")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = subprocess.Popen(
        kvkeep_command("config"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kvkeep_env(),
    )
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    said = command.stderr.read()
    command.stderr.close()
    assert command.wait(30) == FAILED
    assert said == b""


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeep.cli.operator.ask", interrupted)
    assert main(["status"]) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvkeep.cli.operator.ask", broken)
    with pytest.raises(ZeroDivisionError):
        main(["status"])


def test_the_module_is_the_command() -> None:
    done = run_kvkeep("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvkeep ")
