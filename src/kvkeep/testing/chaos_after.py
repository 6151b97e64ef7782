"""What must hold once the load is gone: no byte, lease, descriptor, process or file is left over.

Looks at the server while it is quiet, then stops it and looks at what a stopped server leaves. Each
finding is a sentence; bytes that are somewhere they must not be are added up.
"""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeep.testing.chaos_server import RealServer, disk_bytes, kvkeep

SETTLES_S = 30.0
_LOOK_S = 0.05
_VERIFY_S = 300.0
HELD = ("staging_bytes", "reserved_bytes", "orphaned_bytes", "quarantined_bytes")
PARTS = ("free_bytes", "resident_bytes", "staging_bytes", "orphaned_bytes", "quarantined_bytes")


@dataclass(slots=True)
class Findings:
    """`what`: sentences; empty: all is where it must be."""

    leaked_bytes: int = 0
    what: list[str] = field(default_factory=list)

    def lost(self, size_bytes: int, what: str) -> None:
        """So many bytes are where they must not be."""
        if size_bytes:
            self.leaked_bytes += abs(size_bytes)
            self.what.append(f"{size_bytes} bytes: {what}")

    def expect(self, holds: bool, what: str) -> None:
        """A fact without bytes."""
        if not holds:
            self.what.append(what)


def look_at_quiet(server: RealServer, base: Counter[str]) -> Findings:
    """The server when nobody is connected. `base`: its descriptors when nobody ever was."""
    found = Findings()
    until_s = time.monotonic() + SETTLES_S
    while not _quiet(server, base) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    status = server.status()
    l1 = status["l1"]
    for part in HELD:
        found.lost(l1[part], f"still in {part} {SETTLES_S} s after the last client")
    found.lost(l1["populated_bytes"] - sum(l1[part] for part in PARTS), "in no state")
    found.lost(l1["capacity_bytes"] - l1["populated_bytes"], "never populated")
    found.expect(not status["leases"], f"{status['leases']} leases are left")
    found.expect(not status["sessions"], f"sessions are left: {status['sessions']}")
    found.expect(not any(status["transfers"].values()), f"under way: {status['transfers']}")
    found.expect(not status["problems"], f"problems: {status['problems']}")
    (store,) = status["l2"]
    on_disk = disk_bytes(server.place)
    found.lost(store["used_bytes"] - on_disk, f"L2 counts {store['used_bytes']}, has {on_disk}")
    extra = _grown(server.descriptors(), base)
    found.expect(not extra, f"descriptors that were not there before: {extra}")
    return found


def _quiet(server: RealServer, base: Counter[str]) -> bool:
    status = server.status()
    held = any(status["l1"][part] for part in HELD) or any(status["transfers"].values())
    return not held and not status["sessions"] and not _grown(server.descriptors(), base)


def _grown(now: Counter[str], base: Counter[str]) -> dict[str, int]:
    """Kinds of descriptors of which there are more than at first."""
    return {kind: count - base[kind] for kind, count in now.items() if count > base[kind]}


def look_after_stop(server: RealServer, groups: Sequence[int]) -> Findings:
    """What is left of a server that was told to stop, and of every client there was."""
    found = Findings()
    code = server.stop()
    found.expect(code == 0, f"the server stopped with {code}: {server.log_end()}")
    found.what += server.broken()
    left = [path.name for path in server.socket.parent.iterdir()]
    found.expect(not left, f"beside the socket: {left}")
    for path in (server.place / "tmp").iterdir():
        found.lost(path.stat().st_size, f"half-written in L2: {path.name}")
    found.expect(*_verified(server))
    alive = _alive(groups)
    found.expect(not alive, f"processes are left: {alive}")
    return found


def _verified(server: RealServer) -> tuple[bool, str]:
    command = [*kvkeep(), "verify", server.l2_url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_VERIFY_S)
    if done.returncode:
        return False, f"kvkeep verify ended with {done.returncode}: {done.stdout}{done.stderr}"
    report = json.loads(done.stdout)
    return report["foreign_files"] == 0, f"foreign files in L2: {report['foreign_files']}"


def _alive(groups: Sequence[int]) -> list[int]:
    """Process groups that still have a process; forked children are given time to end."""
    until_s = time.monotonic() + SETTLES_S
    alive = list(groups)
    while alive and time.monotonic() < until_s:
        alive = [group for group in alive if _exists(group)]
        time.sleep(_LOOK_S)
    return alive


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
