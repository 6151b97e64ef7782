"""The configuration: one frozen tree, where each value came from, and what is refused.

Four sources, the later wins: built-in default, TOML file, environment (KVKEEP_SECTION_KEY), flags
(dotted keys). A key nobody knows is refused with the nearest known one named: a typing error that
is silently ignored shows weeks later as a cache of the wrong size. Every value is checked here,
once; code that receives a `Config` does not check again.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field, inspect

from kvkeep.errors import ConfigError
from kvkeep.limits import MIB, parse_amount, parse_bytes, parse_nodes

DEFAULT_FILE = Path("/etc/kvkeep/kvkeep.toml")
ENV_PREFIX = "KVKEEP_"
ENV_FILE = "KVKEEP_CONFIG"
NEAR = 0.7  # a typing error leaves this much in common; less is no hint but a guess
_AMOUNTS = ("l1.size", "quota.default_l1", "quota.default_l2")  # a share, or bytes
SOCKET_PATH_MAX_BYTES = 107  # sockaddr_un.sun_path is 108 bytes with its final zero

Value = str | int | float | bool
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


class SocketConfig(Struct, frozen=True):
    """Where engines reach the server."""

    path: str = "/run/kvkeep/kvkeep.sock"
    group: str = ""  # a group that may connect too; empty: only the server's own user


class L1Config(Struct, frozen=True):
    """The arena in host memory."""

    size: str = "25%"
    numa: str = ""  # nodes to take memory from, such as "0" or "0-1,3"; empty: the kernel's choice
    hugepages: Literal["off", "2MiB"] = "off"
    max_objects: Annotated[int, Meta(ge=1, le=1 << 24)] = 1 << 20
    staging_fraction: Share = 0.5  # of L1
    session_staging_fraction: Share = 0.25  # of what staging may take, for one session
    session_reserve_fraction: Share = 0.5  # of L1, held for reading by one session


class L2Config(Struct, frozen=True):
    """External storage, and what may be under way to and from it."""

    # URLs such as fs:///var/lib/kvkeep?capacity=100GiB, separated by spaces; a file may list them
    backends: str = ""
    policy: Literal["write_through", "write_back", "skip_l1"] = "write_through"
    lookup_wait_s: Seconds = 0.5  # a lookup waits so long at most, unless its request says else
    get_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    put_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    breaker_failures: Annotated[int, Meta(ge=1, le=1000)] = 5  # in a row; then it is left alone
    breaker_open_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0  # doubling from there
    breaker_open_most_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    fetch_fraction: Share = 0.25  # of L1, on its way from L2
    fetch_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 1 << 30  # and never more than this
    fetches: Annotated[int, Meta(ge=1, le=1024)] = 8  # chunks at once, per backend
    persists: Annotated[int, Meta(ge=1, le=1024)] = 4  # chunks at once, per backend
    persist_queue_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 1 << 30
    persist_tries: Annotated[int, Meta(ge=1, le=100)] = 5
    low_water_fraction: Share = 0.2  # of L1: with less free, write_back writes ahead
    drain_s: Seconds = 10.0  # a stopping server persists what is left for so long
    key_file: str = ""  # private file of keys: what goes to L2 is encrypted; empty: it is not
    encrypt_buffer_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 256 * MIB  # per backend


class HttpConfig(Struct, frozen=True):
    """Health, metrics and the dashboard."""

    enabled: bool = True
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 7438  # 0: any free port
    remote: bool = False  # whether `host` may be open to the network
    token_file: str = ""  # private file with the token for what changes state; empty: nothing may


class LogConfig(Struct, frozen=True):
    """What the server logs and how a line looks."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    loop_cpu: bool = False  # whether the loop's watchdog measures CPU time too (2 us per callback)


class PolicyConfig(Struct, frozen=True):
    """Which policy decides."""

    eviction: Literal["lru"] = "lru"


class QuotaConfig(Struct, frozen=True):
    """How much one tenant may take: the requests of one salt, or those without any."""

    default_l1: str = "100%"  # of L1, or bytes; for a tenant without a limit of its own
    default_l2: str = "100%"  # of each backend's capacity, or bytes
    file: str = ""  # the tenants' own limits, as TOML; `kvkeep quota set` writes it


class LimitsConfig(Struct, frozen=True):
    """Bounds of queues and waits."""

    max_frame_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 * MIB
    max_connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    max_push_queue_bytes: Annotated[int, Meta(ge=4096, le=1 << 32)] = 8 * MIB
    handshake_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    gpu_quarantine_s: Seconds = 5.0
    inprogress_after_s: Seconds = 2.0


class Config(Struct, frozen=True):
    """The whole tree; `Config()` holds the built-in defaults."""

    socket: SocketConfig = field(default_factory=SocketConfig)
    l1: L1Config = field(default_factory=L1Config)
    l2: L2Config = field(default_factory=L2Config)
    http: HttpConfig = field(default_factory=HttpConfig)
    log: LogConfig = field(default_factory=LogConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    quota: QuotaConfig = field(default_factory=QuotaConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked tree and, for each dotted key, where its value came from."""

    config: Config
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as a source gave it."""

    value: object
    source: str


def load_config(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    *,
    default_file: Path = DEFAULT_FILE,
) -> LoadedConfig:
    """Merge and check all sources; a flag that is None was not given.

    `env` is the process environment (None: empty). Raises ConfigError, one sentence with the fix.
    """
    env, flags = env or {}, flags or {}
    known = known_keys()
    given = {"socket.path": _default_socket(env)}
    given |= _from_file(_chosen_file(file, env, default_file), known)
    given |= _from_env(env, known)
    given |= _from_flags(flags, known)
    tree: dict[str, dict[str, object]] = {}
    for key, item in given.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = _checked(key, item, known[key])
    config = msgspec.convert(tree, Config)
    sources = {key: given[key].source if key in given else "default" for key in known}
    _check_together(config, sources)
    return LoadedConfig(config, sources)


def rows(loaded: LoadedConfig) -> Iterator[tuple[str, Value, str]]:
    """Yield (dotted key, value, source) in the order of the tree, for `kvkeep config`."""
    for key, source in loaded.sources.items():
        section, _, name = key.partition(".")
        yield key, getattr(getattr(loaded.config, section), name), source


def known_keys() -> dict[str, inspect.Type]:
    """Every dotted key with its type, in the order of the tree."""
    keys: dict[str, inspect.Type] = {}
    for section in msgspec.structs.fields(Config):
        for leaf in msgspec.structs.fields(section.type):
            keys[f"{section.name}.{leaf.name}"] = inspect.type_info(leaf.type)
    return keys


def env_name(key: str) -> str:
    """The environment variable of a dotted key: l1.size is KVKEEP_L1_SIZE."""
    return ENV_PREFIX + key.replace(".", "_").upper()


def socket_path_problem(path: str) -> str | None:
    """Say what is wrong with a socket's path and how to fix it; None if nothing is."""
    if not path:
        return "it must not be empty; leave it out for the default, or name a file"
    if "\0" in path:
        return "a path has no zero byte; remove it"
    if not os.path.isabs(path):
        full = os.path.abspath(os.path.expanduser(path))
        return f"it must be absolute, since engines run in other directories; write {full}"
    size_bytes = len(os.fsencode(path))
    if size_bytes > SOCKET_PATH_MAX_BYTES:
        return (
            f"the path has {size_bytes} bytes and a unix socket allows {SOCKET_PATH_MAX_BYTES}; "
            "choose a shorter one, such as /run/kvkeep/kvkeep.sock"
        )
    if path.endswith("/") or os.path.basename(path) in (".", ".."):
        return f"it names a directory; add a file name, such as {path.rstrip('/')}/kvkeep.sock"
    return None


def _default_socket(env: Mapping[str, str]) -> _Given:
    runtime = env.get("XDG_RUNTIME_DIR", "")
    # The XDG rules say to ignore a relative value.
    if os.path.isabs(runtime):
        return _Given(os.path.join(runtime, "kvkeep/kvkeep.sock"), "default ($XDG_RUNTIME_DIR)")
    return _Given(SocketConfig().path, "default")


def _chosen_file(
    file: str | Path | None, env: Mapping[str, str], default_file: Path
) -> tuple[Path, str] | None:
    """The file to read and who named it; the default one only if it is there."""
    if file is not None:
        return Path(file), "flag --config"
    if env.get(ENV_FILE):
        return Path(env[ENV_FILE]), f"env {ENV_FILE}"
    return (default_file, "the default place") if os.path.lexists(default_file) else None


def _from_file(
    chosen: tuple[Path, str] | None, known: Mapping[str, inspect.Type]
) -> dict[str, _Given]:
    if chosen is None:
        return {}
    path, named_by = chosen
    source = f"file {path}"
    given: dict[str, _Given] = {}
    for section, table in _read_toml(path, named_by).items():
        if section not in Config.__struct_fields__:
            raise ConfigError(_unknown(section, source, (*Config.__struct_fields__, *known)))
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} = {table!r} (from {source}) is a section, not a value: "
                f"write [{section}] on a line of its own and its keys below it"
            )
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in known:
                raise ConfigError(_unknown(key, source, known))
            given[key] = _Given(value, source)
    return given


def _read_toml(path: Path, named_by: str) -> dict[str, object]:
    where = f"the configuration file {path} (named by {named_by})"
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{where} does not exist: create it or name another one") from None
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read ({error.strerror}): name a file that this user may read"
        ) from None
    except ValueError as error:  # broken TOML, or bytes that are no UTF-8
        raise ConfigError(f"{where} is not valid TOML ({error}): correct that place") from None


def _from_env(env: Mapping[str, str], known: Mapping[str, inspect.Type]) -> dict[str, _Given]:
    names = {env_name(key): key for key in known}
    sections = tuple(ENV_PREFIX + name.upper() for name in Config.__struct_fields__)
    given: dict[str, _Given] = {}
    for name, value in env.items():
        if name in names:
            given[names[name]] = _Given(value, f"env {name}")
        elif name in sections or name.startswith(tuple(f"{each}_" for each in sections)):
            raise ConfigError(_unknown(name, "the environment", names))
    return given


def _from_flags(
    flags: Mapping[str, object], known: Mapping[str, inspect.Type]
) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for key, value in flags.items():
        if key not in known:
            raise ConfigError(_unknown(key, "flag", known))
        if value is not None:
            given[key] = _Given(value, "flag")
    return given


def _unknown(key: str, source: str, names: Mapping[str, object] | tuple[str, ...]) -> str:
    """Name the nearest known key: by the whole name, or by its last part in another section."""

    def nearness(name: str) -> float:
        last = SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        return max(SequenceMatcher(None, key, name).ratio(), 0.95 * last)

    nearest = max(names, key=nearness)
    if nearness(nearest) < NEAR:
        return f"{key} (from {source}) is not a known key: see kvkeep config for all keys"
    return f"{key} (from {source}) is not a known key: did you mean {nearest}?"


def _checked(key: str, item: _Given, kind: inspect.Type) -> object:
    """Convert one value to its type, or raise with the key, the value, the limit and the fix."""
    value = item.value
    # Environment and flags are text and may be read as numbers; a TOML file has its own types.
    is_text = isinstance(value, str) and not item.source.startswith("file ")
    try:
        if isinstance(kind, inspect.IntType) and key.endswith("_bytes") and isinstance(value, str):
            value = parse_bytes(value)
        elif key in _AMOUNTS and type(value) is int:
            value = str(value)  # a plain number is bytes
        elif key == "l2.backends" and isinstance(value, list):
            value = " ".join(msgspec.convert(value, list[str]))
        value = msgspec.convert(value, _type_of(key), strict=not is_text)
    except ValueError:  # msgspec.ValidationError is one
        if value == "" and isinstance(kind, inspect.StrType):
            raise ConfigError(_refusal(key, item, "must not be empty")) from None
        raise ConfigError(_refusal(key, item, f"must be {_limit_text(key, kind)}")) from None
    problem = _text_problem(key, value) if isinstance(value, str) else None
    if problem is not None:
        raise ConfigError(_refusal(key, item, f"is refused: {problem}"))
    return value


def _refusal(key: str, item: _Given, why: str) -> str:
    section, _, name = key.partition(".")
    default = getattr(getattr(Config(), section), name)
    end = "" if default == "" else f" (the built-in default is {_shown(default)})"
    return f"{key} = {_shown(item.value)} (from {item.source}) {why}{end}"


def _shown(value: object) -> str:
    """A value as TOML writes it, cut so that a message stays a sentence."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"


def _type_of(key: str) -> object:
    section, _, name = key.partition(".")
    tree = {leaf.name: leaf.type for leaf in msgspec.structs.fields(Config)}
    return {leaf.name: leaf.type for leaf in msgspec.structs.fields(tree[section])}[name]


def _limit_text(key: str, kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(gt=gt, ge=ge, le=le) | inspect.FloatType(gt=gt, ge=ge, le=le):
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            noun += " (of bytes; units such as MiB are allowed)" if key.endswith("_bytes") else ""
            low = f"above {gt:g}" if gt is not None else f"from {ge}"
            return f"{noun} {low} to {le}"
        case _:
            examples = {"l1.size": " such as '25%' or '2GiB'", "l2.backends": " or a list of texts"}
            return "a text" + examples.get(key, "")


def _text_problem(key: str, value: str) -> str | None:
    try:
        match key:
            case "socket.path":
                return socket_path_problem(value)
            case "l2.key_file" | "http.token_file" if value and not os.path.isabs(value):
                return f"it must be absolute; write {os.path.abspath(value)}"
            case "l1.size":
                parse_amount(value)
            case "quota.default_l1" | "quota.default_l2":
                if not parse_amount(value):
                    return "whoever has no limit of its own could store nothing; write 25%, or 2GiB"
            case "quota.file" if value and not os.path.isabs(value):
                return f"it must be absolute; write {os.path.abspath(os.path.expanduser(value))}"
            case "l1.numa":
                parse_nodes(value)
    except ValueError as error:
        return str(error)
    return None


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    """Rules about two keys: the first must not be below the second."""
    rules = (
        ("limits.max_push_queue_bytes", "smaller than one frame", "limits.max_frame_bytes"),
        ("l2.breaker_open_most_s", "less than what it starts with", "l2.breaker_open_s"),
    )
    values = {key: value for key, value, _ in rows(LoadedConfig(config, sources))}
    for high, what, low in rules:
        most, least = values[high], values[low]
        if isinstance(most, int | float) and isinstance(least, int | float) and most < least:
            raise ConfigError(
                f"{high} = {most} (from {sources[high]}) is {what}, {low} = {least} "
                f"(from {sources[low]}): set it to that or more"
            )
