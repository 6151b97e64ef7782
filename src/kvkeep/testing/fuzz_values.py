"""Spoils values and bytes: what a fuzzer does to a valid input, knowing what it is made of.

Most inputs are scripts: a list of steps, each `[who, what, argument]`, packed as msgpack. A step or
a field is dropped, doubled, exchanged, or replaced by something huge, negative, empty or of another
type. All chance comes from the caller.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvkeep.errors import ProtocolError

Value = Any  # what msgpack can hold
Step = list[Value]
Script = list[Step]

_NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 53)
_EDGES = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), -2)
_FLOATS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\0", "../../x", "é" * 40, "s" * 5000, "clear", "force", "1e999", "nan")
_SIZES = (0, 1, 31, 32, 33, 64, 4096, 32 * 300)
_MOST_STEPS = 60


def pack(script: Script) -> bytes:
    """A script as the bytes of an input."""
    return msgspec.msgpack.encode(script)


def unpack(data: bytes) -> Script | None:
    """The script in these bytes; None when there is none."""
    try:
        return msgspec.msgpack.decode(data, type=list[list[Any]])
    except (msgspec.DecodeError, RecursionError):
        return None


def any_value(rng: random.Random) -> Value:
    """Something that is rarely expected."""
    match rng.randrange(8):
        case 0:
            return rng.choice(_NUMBERS)
        case 1:
            return rng.choice(_EDGES)
        case 2:
            return rng.choice(_FLOATS)
        case 3:
            return rng.choice(_TEXTS)
        case 4 | 5:
            return rng.randbytes(rng.choice(_SIZES))
        case 6:
            return rng.choice((None, True, False, []))
        case _:
            return [rng.choice(_NUMBERS) for _ in range(rng.choice((1, 2, 300)))]


def changed(rng: random.Random, value: Value) -> Value:
    """The value with one part of it changed."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        return _changed_list(rng, value)
    if isinstance(value, bytes) and value and rng.random() < 0.6:
        return changed_bytes(rng, value)
    if isinstance(value, str) and value and rng.random() < 0.6:
        return _changed_text(rng, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and rng.random() < 0.6:
        return min(max(value + rng.choice((-1, 1, 2, 1 << 20)), -(1 << 63)), (1 << 64) - 1)
    return any_value(rng)


def _changed_text(rng: random.Random, old: str) -> str:
    at = rng.randrange(len(old))
    some = rng.choice(("", old[at] * 2, "0", "\0", '"', "é", old))
    return old[:at] + some + old[at + 1 :]


def _changed_list(rng: random.Random, old: list[Value]) -> list[Value]:
    new = list(old)
    at = rng.randrange(len(new))
    match rng.randrange(7):
        case 0:
            del new[at]
        case 1:
            new.insert(at, new[at])
        case 2:
            other = rng.randrange(len(new))
            new[at], new[other] = new[other], new[at]
        case _:
            new[at] = changed(rng, new[at])
    return new


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, or a piece cut out, doubled or put in."""
    new = bytearray(data)
    at = rng.randrange(len(new)) if new else 0
    match rng.randrange(6):
        case 0:
            del new[at:]
        case 1:
            del new[at : at + rng.choice((1, 4, 32, 4096))]
        case 2:
            new[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
        case 3:
            new[at:at] = new[at : at + rng.choice((1, 32, 200))]
        case _:
            for _ in range(rng.choice((1, 1, 2, 8))):
                if new:
                    new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    return bytes(new)


def changed_data(
    rng: random.Random,
    data: bytes,
    others: Sequence[bytes],
    step: Callable[[random.Random], Step],
) -> bytes:
    """A packed script changed, or just bytes where it is none; `step` makes a new one."""
    script = unpack(data)
    if script is None:
        return changed_bytes(rng, data)
    some = [found for found in map(unpack, rng.choices(others, k=2)) if found is not None]
    return pack(changed_script(rng, script, some, step))


def changed_script(
    rng: random.Random,
    script: Script,
    others: Sequence[Script],
    step: Callable[[random.Random], Step],
) -> Script:
    """A script with some steps or fields changed; `step` makes a new one."""
    new = [list(one) for one in script]
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(new)) if new else 0
        match rng.randrange(9):
            case 0 if new:
                del new[at]
            case 1 if new:
                new.insert(rng.randrange(len(new) + 1), list(new[at]))
            case 2 if new:
                other = rng.randrange(len(new))
                new[at], new[other] = new[other], new[at]
            case 3 | 4:
                new.insert(at, step(rng))
            case 5:
                other_script = rng.choice(others) if others else new
                start = rng.randrange(len(other_script) + 1)
                new[at:at] = [list(one) for one in other_script[start : start + 6]]
            case _ if new and new[at]:
                new[at][-1] = changed(rng, new[at][-1])
    return new[:_MOST_STEPS]


def shorter(script: Script, fails: Callable[[Script], bool], tries: int = 60) -> Script:
    """The script with every step left out that the failure does not need."""
    at = len(script) - 1
    while at >= 0 and tries > 0:
        less = script[:at] + script[at + 1 :]
        tries -= 1
        if fails(less):
            script = less
        at -= 1
    return script


def checked(condition: object, why: str) -> None:
    """What the bytes of an input must be for a target to understand it."""
    if not condition:
        raise ProtocolError(why)
