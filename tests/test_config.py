"""Configuration: which source wins, what is refused, and what the refusal says."""

import os
from pathlib import Path

import msgspec
import pytest

from kvkeep.config import Config, LoadedConfig, env_name, known_keys, load_config, rows
from kvkeep.errors import ConfigError, KVKeepError
from kvkeep.limits import MIB

NO_FILE = Path("/nonexistent/kvkeep.toml")


def load(
    file: Path | None = None,
    env: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> LoadedConfig:
    """Load without looking at the machine's own default file."""
    return load_config(file, env, flags, default_file=NO_FILE)


def refusal(
    file: Path | None = None,
    env: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, env, flags)
    text = str(caught.value)
    assert "\n" not in text, "a refusal is one sentence on one line"
    return text


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvkeep.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_ones_of_the_design() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert loaded.config.l1.size == "25%"
    assert loaded.config.l1.staging_fraction == 0.5
    assert loaded.config.limits.max_frame_bytes == 8 * MIB
    assert set(loaded.sources.values()) == {"default"}


def test_every_default_passes_its_own_check() -> None:
    given: dict[str, object] = {key: value for key, value, _ in rows(load())}
    assert load(flags=given).config == Config()


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load().config.l1.size = "1GiB"  # type: ignore[misc]


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = toml(tmp_path, '[l1]\nsize = "1GiB"\nmax_objects = 10\n[http]\nport = 1\n')
    env = {"KVKEEP_L1_SIZE": "2GiB", "KVKEEP_HTTP_PORT": "2", "KVKEEP_LOG_LEVEL": "debug"}
    loaded = load(file, env, {"l1.size": "3GiB", "http.host": None})
    assert loaded.config.l1.size == "3GiB"
    assert loaded.config.http.port == 2
    assert loaded.config.l1.max_objects == 10
    assert loaded.config.log.level == "debug"
    assert loaded.sources["l1.size"] == "flag"
    assert loaded.sources["http.port"] == "env KVKEEP_HTTP_PORT"
    assert loaded.sources["l1.max_objects"] == f"file {file}"
    assert loaded.sources["http.host"] == "default", "a flag that is None was not given"


def test_every_key_can_be_set_by_env_and_by_flag() -> None:
    values: dict[str, str] = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value, _ in rows(load())
    }
    by_env = load(env={env_name(key): value for key, value in values.items()})
    by_flag = load(flags=dict(values))
    assert by_env.config == by_flag.config == Config()
    assert by_env.sources == {key: f"env {env_name(key)}" for key in known_keys()}


def test_rows_list_every_key_once_with_its_value() -> None:
    listed = list(rows(load(flags={"http.enabled": "false"})))
    assert [key for key, _, _ in listed] == list(known_keys())
    assert ("http.enabled", False, "flag") in listed


@pytest.mark.parametrize(
    ("runtime", "path", "source"),
    [
        ("/run/user/7", "/run/user/7/kvkeep/kvkeep.sock", "default ($XDG_RUNTIME_DIR)"),
        ("", "/run/kvkeep/kvkeep.sock", "default"),
        ("relative", "/run/kvkeep/kvkeep.sock", "default"),
    ],
)
def test_default_socket_follows_the_runtime_directory(runtime: str, path: str, source: str) -> None:
    loaded = load(env={"XDG_RUNTIME_DIR": runtime})
    assert loaded.config.socket.path == path
    assert loaded.sources["socket.path"] == source


def test_file_from_env_and_default_place(tmp_path: Path) -> None:
    file = toml(tmp_path, "[http]\nport = 5\n")
    assert load(env={"KVKEEP_CONFIG": str(file)}).config.http.port == 5
    assert load_config(None, {}, {}, default_file=file).config.http.port == 5
    other = tmp_path / "other.toml"
    other.write_text("[http]\nport = 6\n")
    assert load(other, {"KVKEEP_CONFIG": str(file)}).config.http.port == 6


def test_a_plain_number_is_bytes_and_units_are_allowed(tmp_path: Path) -> None:
    file = toml(tmp_path, '[l1]\nsize = 4294967296\n[limits]\nmax_frame_bytes = "1MiB"\n')
    config = load(file).config
    assert config.l1.size == "4294967296"
    assert config.limits.max_frame_bytes == MIB


# --- unknown keys: the nearest known one is named ---


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ('[l1]\nsise = "1GiB"\n', "l1.size"),
        ('[l1]\nhost = "x"\n', "http.host"),
        ("[limit]\nmax_connections = 3\n", "limits"),
        ('size = "1GiB"\n', "l1.size"),
    ],
)
def test_unknown_key_in_a_file(tmp_path: Path, text: str, nearest: str) -> None:
    file = toml(tmp_path, text)
    assert refusal(file).endswith(f"did you mean {nearest}?")
    assert str(file) in refusal(file)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVKEEP_L1_SIZ", "KVKEEP_L1_SIZE"),
        ("KVKEEP_LIMITS_MAX_CONNECTION", "KVKEEP_LIMITS_MAX_CONNECTIONS"),
        ("KVKEEP_SOCKET", "KVKEEP_SOCKET_PATH"),
    ],
)
def test_unknown_key_in_the_environment(name: str, nearest: str) -> None:
    text = refusal(env={name: "1"})
    assert name in text
    assert text.endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize("key", ["a.b", "sever.x", "zzz"])
def test_a_far_key_is_not_guessed_at(tmp_path: Path, key: str) -> None:
    for text in (refusal(flags={key: 1}), refusal(toml(tmp_path, f"{key} = 1\n"))):
        assert text.endswith("is not a known key: see kvkeep config for all keys")
    assert f"{key} (from flag) is" in refusal(flags={key: 1})


def test_other_variables_are_left_alone() -> None:
    env = {"KVKEEP_SERVICE_HOST": "10.0.0.1", "KVKEEPER_L1_SIZ": "1", "KVKEEP_LOGIN": "x"}
    assert load(env=env).config == Config()


def test_unknown_flag() -> None:
    assert refusal(flags={"l1.hugepage": "off"}).endswith("did you mean l1.hugepages?")


# --- wrong values: key, value, limit, and a value that works ---


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("http.port", "70000", "from 0 to 65535"),
        ("http.port", "-1", "from 0 to 65535"),
        ("http.port", "7.5", "a whole number"),
        ("http.port", True, "a whole number"),
        ("http.host", "", "must not be empty"),
        ("http.enabled", "yes", "true or false"),
        ("log.level", "loud", "debug, error, info, warning"),
        ("policy.eviction", "random", "one of lru"),
        ("l1.hugepages", "1GiB", "one of 2MiB, off"),
        ("l1.staging_fraction", "0", "above 0 to 1"),
        ("l1.staging_fraction", "1.5", "above 0 to 1"),
        ("l1.max_objects", 0, "from 1"),
        ("limits.handshake_timeout_s", "nan", "a number above 0"),
        ("limits.gpu_quarantine_s", "inf", "from 0 to 3600"),
        ("limits.max_frame_bytes", "8MiX", "units such as MiB"),
        ("limits.max_frame_bytes", 10, "from 4096"),
        ("l1.size", "a lot", "25% or a size such as 2GiB"),
        ("l1.size", "101%", "at most 100%"),
        ("l1.size", "0%", "at least 0.001%"),
        ("l1.size", "100", "100 has no unit and is hardly bytes; write 100%, or 100GiB"),
        ("quota.default_l1", "10", "write 10%, or 10GiB"),
        ("l1.size", "9" * 5000, "5002 characters"),
        ("l1.size", 0.25, "'25%' or '2GiB'"),
        ("quota.default_l1", "0", "could store nothing"),
        ("quota.default_l2", "0MiB", "could store nothing"),
        ("quota.default_l2", "half", "25% or a size such as 2GiB"),
        ("quota.file", "quotas.toml", "it must be absolute"),
        ("l1.numa", "0-", "'0-1,3'"),
        ("l1.numa", "3-1", "'0-1,3'"),
        ("l1.numa", "0,,1", "'0-1,3'"),
        ("socket.path", "kvkeep.sock", os.path.abspath("kvkeep.sock")),
        ("socket.path", "~/k.sock", os.path.expanduser("~/k.sock")),
        ("socket.path", "/run/kvkeep/", "/run/kvkeep/kvkeep.sock"),
        ("socket.path", "/run/a\0b", "zero byte"),
        ("socket.path", "/" + "x" * 107, "108 bytes and a unix socket allows 107"),
        ("socket.path", "/" + "ü" * 54, "109 bytes"),
    ],
)
def test_wrong_value(key: str, value: object, limit: str) -> None:
    text = refusal(flags={key: value})
    assert text.startswith(f"{key} = ")
    assert "(from flag)" in text
    assert limit in text


def test_an_empty_socket_path_is_not_made_a_directory() -> None:
    text = refusal(flags={"socket.path": ""})
    assert "must not be empty" in text
    assert os.getcwd() not in text


def test_the_longest_path_a_socket_allows_is_accepted() -> None:
    path = "/" + "x" * 106
    assert load(flags={"socket.path": path}).config.socket.path == path


def test_a_file_has_types_of_its_own(tmp_path: Path) -> None:
    text = refusal(toml(tmp_path, '[http]\nport = "7438"\n'))
    assert "http.port = '7438'" in text
    assert "a whole number" in text


def test_a_value_where_a_section_belongs(tmp_path: Path) -> None:
    assert "write [l1]" in refusal(toml(tmp_path, 'l1 = "4GiB"\n'))
    assert "a text" in refusal(toml(tmp_path, "[l1.size]\nbytes = 3\n"))


def test_a_push_queue_must_hold_one_frame() -> None:
    text = refusal(env={"KVKEEP_LIMITS_MAX_FRAME_BYTES": "16MiB"})
    assert "limits.max_push_queue_bytes = 8388608" in text
    assert "16777216 (from env KVKEEP_LIMITS_MAX_FRAME_BYTES)" in text
    flags = {"limits.max_frame_bytes": "16MiB", "limits.max_push_queue_bytes": "16MiB"}
    assert load(flags=dict(flags)).config.limits.max_frame_bytes == 16 * MIB


def test_a_breaker_never_waits_less_than_at_first() -> None:
    text = refusal(flags={"l2.breaker_open_most_s": "2"})
    assert "l2.breaker_open_most_s = 2.0 (from flag)" in text
    assert "l2.breaker_open_s = 5.0 (from default): set it to that or more" in text
    assert "l2.breaker_open_s = 90.0" in refusal(env={"KVKEEP_L2_BREAKER_OPEN_S": "90"})
    equal: dict[str, object] = {"l2.breaker_open_s": "7", "l2.breaker_open_most_s": "7"}
    assert load(flags=equal).config.l2.breaker_open_most_s == 7


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('["fs:///a", "fs:///b?name=b"]', "fs:///a fs:///b?name=b"),
        ('"fs:///a fs:///b"', "fs:///a fs:///b"),
        ("[]", ""),
    ],
)
def test_backends_may_be_a_list_in_a_file(tmp_path: Path, written: str, read: str) -> None:
    loaded = load(toml(tmp_path, f"[l2]\nbackends = {written}\n"))
    assert loaded.config.l2.backends == read


@pytest.mark.parametrize("written", ['["fs:///a", 3]', '[["fs:///a"]]', "7"])
def test_backends_are_texts(tmp_path: Path, written: str) -> None:
    text = refusal(toml(tmp_path, f"[l2]\nbackends = {written}\n"))
    assert text.startswith("l2.backends = ")
    assert "must be a text or a list of texts" in text


# --- files that cannot be used ---


def test_a_named_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert "does not exist" in refusal(missing)
    assert "env KVKEEP_CONFIG" in refusal(env={"KVKEEP_CONFIG": str(missing)})


def test_a_directory_as_file(tmp_path: Path) -> None:
    assert "cannot be read (Is a directory)" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"[l1\nsize=", b"\xff\xfe", b"[l1]\nsize = 1\nsize = 2\n"])
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert "is not valid TOML" in refusal(path)


def test_errors_have_the_one_root_and_the_tree_can_be_encoded() -> None:
    assert issubclass(ConfigError, KVKeepError)
    assert msgspec.json.decode(msgspec.json.encode(load().config), type=Config) == Config()
