"""`kvkeep fuzz`: bad input of every kind against the places where strangers' bytes come in.

A target runs one input and says what it saw; anything but a stated outcome is a failure. An input
that shows something new is kept for the run and changed further. A failing input is made shorter,
saved, and one line says how to run it again.
"""

import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvkeep.errors import ConfigError, KVKeepError
from kvkeep.testing.fuzz_values import pack, shorter, unpack

Inputs = Mapping[str, bytes]
SUFFIX = ".bin"  # of stored inputs
_MOST_FAILURES = 5  # of one target; more say nothing new
_MOST_KEPT = 3000
_MOST_S = 60.0  # for one input: something hangs
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|\d+")


class Hangs(KVKeepError):
    """An input does not come to an end."""


class Target(Protocol):
    """One place where bytes come in."""

    name: str

    def seeds(self) -> Inputs:
        """Valid inputs by name."""

    def changed(self, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """An input made from this one."""

    def run(self, data: bytes) -> frozenset[str]:
        """What was seen, as a few words each. Raises when something is wrong."""

    def close(self) -> None:
        """End what it started."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, with what, and where failing inputs go."""

    seconds: float
    targets: Sequence[str]
    seed: int = 0
    keep: Path = Path("fuzz-findings")
    corpus: Path | None = None  # a folder with one folder of inputs per target


@dataclass(slots=True)
class _Tally:
    """One target's part of the report."""

    inputs: int = 0
    seen: set[str] = field(default_factory=set)
    pool: list[bytes] = field(default_factory=list)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)


def run(plan: Plan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Fuzz each target for its share of the time; the answer of `kvkeep fuzz --json`."""
    began_s = time.monotonic()
    tallies: dict[str, _Tally] = {}
    for name in plan.targets:
        target = open_target(name)
        try:
            tallies[name] = _fuzz(target, plan, progress or (lambda text: None))
        finally:
            target.close()
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "seed": plan.seed,
        "inputs": sum(tally.inputs for tally in tallies.values()),
        "targets": {
            name: {"inputs": t.inputs, "kept": len(t.pool), "outcomes": len(t.seen)}
            for name, t in tallies.items()
        },
        "failures": [found for tally in tallies.values() for found in tally.failures.values()],
    }


def open_target(name: str) -> Target:
    """The target of that name. Raises ConfigError."""
    from kvkeep.testing import fuzz_files, fuzz_handshake, fuzz_header, fuzz_wire

    makers: dict[str, Callable[[], Target]] = {
        "wire": fuzz_wire.Wire,
        "header": fuzz_header.HeaderPage,
        "file": fuzz_files.Files,
        "handshake": fuzz_handshake.Handshake,
    }
    if name not in makers:
        raise ConfigError(f"--target {name}: known are {', '.join(makers)}")
    return makers[name]()


TARGETS = ("wire", "header", "file", "handshake")


def replay(name: str, data: bytes) -> str:
    """Run one input; what is wrong, or nothing."""
    target = open_target(name)
    try:
        return _attempt(target, data)[1]
    finally:
        target.close()


def inputs_of(corpus: Path | None, name: str) -> dict[str, bytes]:
    """The stored inputs of a target, by name."""
    folder = corpus / name if corpus is not None else None
    if folder is None or not folder.is_dir():
        return {}
    return {path.stem: path.read_bytes() for path in sorted(folder.glob(f"*{SUFFIX}"))}


def _fuzz(target: Target, plan: Plan, progress: Callable[[str], None]) -> _Tally:
    tally = _Tally()
    rng = random.Random(f"{plan.seed} {target.name}")
    until_s = time.monotonic() + plan.seconds / len(plan.targets)
    first = [*target.seeds().values(), *inputs_of(plan.corpus, target.name).values()]
    for data in first:
        _judge(target, data, plan, tally)
    tally.pool = first + [data for data in tally.pool if data not in first]
    while time.monotonic() < until_s and len(tally.failures) < _MOST_FAILURES:
        # What was kept last is the least explored.
        recent = tally.pool[-40:] if rng.random() < 0.5 else tally.pool
        _judge(target, target.changed(rng, rng.choice(recent), tally.pool), plan, tally)
        if tally.inputs % 100 == 0:
            progress(f"{target.name}: {tally.inputs} inputs, {len(tally.seen)} outcomes")
    return tally


def _judge(target: Target, data: bytes, plan: Plan, tally: _Tally) -> None:
    tally.inputs += 1
    seen, wrong = _attempt(target, data)
    if wrong:
        kind = class_of(wrong)
        if kind not in tally.failures:
            tally.failures[kind] = _found(target, data, wrong, plan.keep)
    elif not seen <= tally.seen and len(tally.pool) < _MOST_KEPT:
        tally.seen |= seen
        tally.pool.append(data)


def _attempt(target: Target, data: bytes) -> tuple[frozenset[str], str]:
    """What was seen, and what is wrong."""
    try:
        with _at_most(_MOST_S):
            return target.run(data), ""
    except Exception as error:  # whatever it is: that is what we look for
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return frozenset(), f"{type(error).__name__}: {error}{place}"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise Hangs in what takes longer; an alarm that was set before goes on after it."""

    def ring(*_: object) -> None:
        raise Hangs(f"one input takes more than {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():  # alarms ring there alone
        yield
        return
    began_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    other_s = signal.setitimer(signal.ITIMER_REAL, seconds)[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if other_s:
            left_s = max(0.001, other_s - (time.monotonic() - began_s))
            signal.setitimer(signal.ITIMER_REAL, left_s)


def _found(target: Target, data: bytes, wrong: str, keep: Path) -> dict[str, Any]:
    """Shorten and save a failing input."""
    kind = class_of(wrong)
    script = unpack(data)
    if script is not None and Hangs.__name__ not in wrong:  # each try would hang as long

        def fails(less: list[list[Any]]) -> bool:
            return class_of(_attempt(target, pack(less))[1]) == kind

        data = pack(shorter(script, fails))
    keep.mkdir(parents=True, exist_ok=True)
    digest = random.Random(data).getrandbits(32)  # a name that only depends on the input
    path = keep / f"{target.name}-{digest:08x}{SUFFIX}"
    path.write_bytes(data)
    again = f"kvkeep fuzz --target {target.name} --input {path}"
    return {"target": target.name, "what": wrong, "input": str(path), "again": again}


def class_of(text: str) -> str:
    """A text without its numbers, so that two of a kind are equal."""
    return _DIGITS.sub("#", text)[:120]
