"""The JSON after vLLM's `--kv-transfer-config`: what is wrong with it, and what to type instead.

`kvkeep doctor` and the connector ask the same function, so that a flag which doctor calls right is
one with which the engine starts. Plain values in, sentences out; vLLM is not imported.
"""

import json
import shlex
from collections.abc import Iterator, Mapping

from kvkeep.config import socket_path_problem

CONNECTOR = "KVKeepConnector"
KV_ROLES = ("kv_both", "kv_producer", "kv_consumer")
EXTRA = "kv_connector_extra_config"
EXTRA_KEYS = ("socket", "chunk_tokens", "autostart", "autostart_args")
MAX_CHUNK_TOKENS = 1 << 16
ENGINE_FLAG = {
    "kv_connector": CONNECTOR,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
# The fields of vLLM 0.32: it does not start with any other.
VLLM_KEYS = (
    *ENGINE_FLAG,
    EXTRA,
    "engine_id",
    "kv_buffer_device",
    "kv_port",
    "kv_connector_module_path",
    "enable_permute_local_kv",
)


def flag_problems(settings: Mapping[str, object]) -> list[str]:
    """All that must change before an engine runs with this flag; empty if it is right."""
    return [*_top_problems(settings), *_extra_problems(settings.get(EXTRA, {}))]


def engine_flag(settings: Mapping[str, object] | None = None, *, socket: str = "") -> str:
    """What to type after `vllm serve MODEL`: `settings` are kept where they are right.

    `socket` is named where the flag has no path of its own; empty: engines find the default.
    """
    given = settings or {}
    fixed = {key: value for key, value in given.items() if key in VLLM_KEYS and key != EXTRA}
    role = given.get("kv_role")
    fixed |= ENGINE_FLAG | ({"kv_role": role} if role in KV_ROLES else {})
    extra = _right_extra(given.get(EXTRA))
    if socket:
        extra.setdefault("socket", socket)
    if extra:
        fixed[EXTRA] = extra
    return "--kv-transfer-config " + shlex.quote(json.dumps(fixed, separators=(",", ":")))


def _top_problems(settings: Mapping[str, object]) -> Iterator[str]:
    connector = settings.get("kv_connector")
    if connector != CONNECTOR:
        yield f"kv_connector is {_shown(connector)}, not {CONNECTOR}"
    if "kv_role" not in settings:
        yield "kv_role is missing, and vLLM does not start without it"
    elif settings["kv_role"] not in KV_ROLES:
        yield f"kv_role is {_shown(settings['kv_role'])}, not one of {', '.join(KV_ROLES)}"
    policy = settings.get("kv_load_failure_policy")
    if policy is None:
        yield (
            "kv_load_failure_policy is missing, and vLLM's default, fail, turns a cache fault "
            "into a failed request"
        )
    elif policy != "recompute":
        yield (
            f"kv_load_failure_policy is {_shown(policy)}, which turns a cache fault into a "
            "failed request"
        )
    unknown = sorted(set(settings) - set(VLLM_KEYS))
    if unknown:
        yield f"vLLM does not start with the unknown keys {', '.join(unknown)}; remove them"


def _extra_problems(extra: object) -> Iterator[str]:
    if not isinstance(extra, Mapping):
        yield f"{EXTRA} is {_shown(extra)}, not an object; known keys are {', '.join(EXTRA_KEYS)}"
        return
    unknown = sorted(str(key) for key in extra if key not in EXTRA_KEYS)
    if unknown:
        known = ", ".join(EXTRA_KEYS)
        yield f"{EXTRA} has unknown keys {', '.join(unknown)}; known are {known}"
    for key in EXTRA_KEYS:
        problem = _value_problem(key, extra[key]) if key in extra else None
        if problem is not None:
            yield problem


def _value_problem(key: str, value: object) -> str | None:
    if key == "socket":
        problem = _socket_problem(value)
        return None if problem is None else f"socket = {_shown(value)}: {problem}"
    if key == "autostart":
        fits = isinstance(value, bool)
        return None if fits else f"autostart = {_shown(value)} must be true or false"
    if key == "autostart_args":
        problem = _flags_problem(value)
        return None if problem is None else f"autostart_args = {_shown(value)}: {problem}"
    is_number = isinstance(value, int) and not isinstance(value, bool)  # true is an int to Python
    if is_number and 1 <= value <= MAX_CHUNK_TOKENS:  # type: ignore[operator]
        return None
    return f"chunk_tokens = {_shown(value)} must be a whole number from 1 to {MAX_CHUNK_TOKENS}"


def _socket_problem(path: object) -> str | None:
    if not isinstance(path, str):
        return "a path is a text; leave it out for the default"
    if not path:
        return "it is empty; leave it out for the default"
    try:
        return socket_path_problem(path)
    except UnicodeEncodeError:  # JSON can spell half a character
        return "no file can have this name; write another path"


def _flags_problem(flags: object) -> str | None:
    if not isinstance(flags, str):
        return 'it must be one text with flags of kvkeep serve, such as "--l1-size 4GiB"'
    try:
        given = shlex.split(flags)
    except ValueError as error:
        return f"it cannot be split into flags: {error}"
    if any(flag.split("=")[0] == "--socket" for flag in given):
        return "leave --socket out of it; the engine's own socket is used"
    return None


def _right_extra(extra: object) -> dict[str, object]:
    if not isinstance(extra, Mapping):
        return {}
    known = {key: extra[key] for key in EXTRA_KEYS if key in extra}
    return {key: value for key, value in known.items() if _value_problem(key, value) is None}


def _shown(value: object) -> str:
    """A value as JSON, cut so that a message stays a sentence."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"
