"""config and doctor: what they print, and when doctor fails."""

from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.servers import running_server

from kvkeep.config import known_keys


def test_config_names_every_key_and_its_source(
    kvkeep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvkeep.toml"
    file.write_text('[l1]\nsize = "64MiB"\n')
    monkeypatch.setenv("KVKEEP_HTTP_PORT", "0")
    done = kvkeep("config", "--config", file, "--set", "log.level=debug", "--json")
    assert done.code == 0
    found = {row["key"]: (row["value"], row["source"]) for row in done.json}
    assert list(found) == list(known_keys())
    assert found["l1.size"] == ("64MiB", f"file {file}")
    assert found["http.port"] == (0, "env KVKEEP_HTTP_PORT")
    assert found["log.level"] == ("debug", "flag")
    assert found["policy.eviction"] == ("lru", "default")
    shown = kvkeep("config", "--config", file)
    assert all(key in shown.out for key in found)
    assert f"file {file}" in shown.out


@pytest.mark.slow
def test_doctor(kvkeep: Command, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        arguments = ("doctor", "--socket", server.socket, "--set", "http.port=0")
        done = kvkeep(*arguments, "--json")
        assert set(done.json) == {"status", "checks"}
        assert all(
            set(check) == {"name", "status", "detail", "fix"} for check in done.json["checks"]
        )
        checks = {check["name"]: check for check in done.json["checks"]}
        assert f"process {server.pid}" in checks["socket"]["detail"]
        failed = [check for check in checks.values() if check["status"] == "fail"]
        assert done.code == (1 if failed else 0)
        shown = kvkeep(*arguments)
        assert shown.code == done.code
        assert all(name in shown.out for name in checks)


def test_doctor_fails_on_the_wrong_load_failure_policy(kvkeep: Command, tmp_path: Path) -> None:
    flag = '{"kv_connector":"KVKeepConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}'
    socket = tmp_path / "run" / "kvkeep.sock"
    done = kvkeep("doctor", "--socket", socket, "--kv-transfer-config", flag, "--json")
    assert done.code == 1
    assert done.json["status"] == "fail"
    (check,) = [check for check in done.json["checks"] if check["name"] == "engine flag"]
    assert check["status"] == "fail"
    assert '"kv_load_failure_policy":"recompute"' in check["fix"]


def test_doctor_shows_a_long_fix_whole(kvkeep: Command, tmp_path: Path) -> None:
    done = kvkeep("doctor", "--socket", tmp_path / "kvkeep.sock")
    assert "kv_load_failure_policy" in done.out
    assert "…" not in done.out
