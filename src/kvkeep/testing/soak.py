"""`kvkeep soak`: steady load on a real server with an L2, for minutes to hours, and no strikes.

Three questions at the end. Does the server's memory grow? Do its descriptors, or its clients'? And
do its counters say, to the byte, what the clients counted themselves? Memory is resident memory
without shared pages: those are the arena's own, as large as L1 and no larger. The first half is
warm-up: tables with a bound fill up, and so do the free lists of the interpreter. Growth means more
than 1 % of it in an hour, with two standard errors to spare; a run under twenty minutes is too
short to judge it.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import kvkeep.client
from kvkeep.testing.chaos_after import look_after_stop, look_at_quiet
from kvkeep.testing.chaos_client import ChaosClient, Habits, Layout, Orders
from kvkeep.testing.chaos_fork import forked, open_files
from kvkeep.testing.chaos_ledger import Count, Ledger, Row, Story
from kvkeep.testing.chaos_server import RealServer, Size, until
from kvkeep.testing.soak_books import Line, books
from kvkeep.testing.soak_trend import Trend, level_growth, trend

LAYOUT = Layout("soak", (64 << 10,))
HABITS = Habits(
    reread=0, cancel=0, fork=0.2, reconnect=0.5, odd=False, patience_s=60.0, pause_s=0.006
)
CLIENTS = 3
WARM_SHARE = 0.5  # bounded tables fill, and the interpreter's free lists
JUDGED_MINUTES = 20.0
GROWTH_PER_HOUR = 0.01  # of its memory
_SAMPLE_S = 0.5
_ENDS_S = 120.0
_MOST_LINES = 20

Say = Callable[[str], None]


@dataclass(slots=True)
class Samples:
    """What was seen, once in a while."""

    times_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[list[int]] = field(default_factory=list)  # of the server, then each client

    def warm(self) -> "Samples":
        """Without the warm-up."""
        first = int(len(self.times_s) * WARM_SHARE)
        return Samples(self.times_s[first:], self.rss_bytes[first:], self.descriptors[first:])

    def growth(self) -> int:
        """Descriptors that came and stayed, over all processes."""
        return sum(max(0, level_growth(each)) for each in zip(*self.descriptors, strict=True))


def run(minutes: float, seed: int, say: Say) -> dict[str, Any]:
    """The report of `kvkeep soak --json`."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-soak-") as folder, ExitStack() as stack:
        story, ledger = Story(Path(folder) / "story"), Ledger(CLIENTS)
        server = RealServer(Path(folder), Size())
        stack.callback(server.end)
        say("starting a server")
        server.start()
        server.wait_whole()
        base = server.descriptors()
        clients = [
            forked(lambda n=n, row=row: _live(str(server.socket), seed + n, row, story), story)  # type: ignore[misc]
            for n, row in enumerate(ledger.rows)
        ]
        stack.callback(_kill, clients)
        samples = _sample(minutes, server, ledger, say)
        groups = list(clients)
        _end(clients, story)
        found = look_at_quiet(server, base)
        lines = books(server.metrics(), server.status()["l1"], ledger, LAYOUT.chunk_bytes)
        after = look_after_stop(server, groups)
        what = [*found.what, *after.what, *story.lines()[:_MOST_LINES]]
        return _report(minutes, samples.warm(), lines, ledger, what)


def _live(socket: str, seed: int, row: Row, story: Story) -> None:
    """A client process; it waits for every answer, since each of them is in the books."""
    os.setpgid(0, 0)
    told: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    signal.signal(signal.SIGTERM, tell)
    kvkeep.client.PATIENCE_S = HABITS.patience_s
    client = ChaosClient(Orders(socket, f"soak-{seed}", LAYOUT, HABITS, seed), row, story)
    client.work(lambda: bool(told))
    client.close()


def _sample(minutes: float, server: RealServer, ledger: Ledger, say: Say) -> Samples:
    samples, started_s = Samples(), time.monotonic()
    while (now_s := time.monotonic() - started_s) < 60 * minutes:
        samples.times_s.append(now_s)
        samples.rss_bytes.append(private_bytes(server.pid))
        opened = [len(open_files(server.pid)), *(row[Count.DESCRIPTORS] for row in ledger.rows)]
        samples.descriptors.append(opened)
        say(
            f"{now_s:.0f} of {60 * minutes:.0f} s: {ledger.total(Count.OPERATIONS)} operations, "
            f"{ledger.total(Count.RIGHT_CHUNKS)} chunks verified, "
            f"{samples.rss_bytes[-1] / 1e6:.1f} MB, {opened[0]} descriptors"
        )
        time.sleep(_SAMPLE_S)
    return samples


def private_bytes(pid: int) -> int:
    """Resident memory of a process without shared pages."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def _end(clients: list[int], story: Story) -> None:
    """Tell every client to end, and wait; those that did not are left in the list."""
    for pid in clients:
        os.kill(pid, signal.SIGTERM)

    def all_gone() -> bool:
        for pid in list(clients):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                clients.remove(pid)
                if status:
                    story.tell(f"a client ended with {os.waitstatus_to_exitcode(status)}")
        return not clients

    until(all_gone, _ENDS_S, lambda: "clients do not end")


def _kill(clients: list[int]) -> None:
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _report(
    minutes: float, warm: Samples, lines: list[Line], ledger: Ledger, what: list[str]
) -> dict[str, Any]:
    hours = [seconds / 3600 for seconds in warm.times_s]
    rss: Trend = trend(hours, warm.rss_bytes)
    unequal = [line for line in lines if line.server != line.clients]
    judged = minutes >= JUDGED_MINUTES
    grows = judged and rss.grows(GROWTH_PER_HOUR * rss.mean)
    fd_growth = warm.growth()
    failed = ledger.total(Count.WRONG_BYTES) + ledger.total(Count.FAILED)
    return {
        "minutes": minutes,
        "rss_slope_bytes_per_hour": round(rss.slope),
        "rss_bytes": round(rss.mean),
        "fd_growth": fd_growth,
        "ledger_mismatches": len(unequal),
        "rss_slope_error": round(rss.error) if len(hours) >= 3 else None,
        "rss_judged": judged,
        "rss_grows": grows,
        "ledger_lines": len(lines),
        "operations": ledger.total(Count.OPERATIONS),
        "stored_bytes": ledger.total(Count.COMMITTED_BYTES),
        "verified_bytes": ledger.total(Count.READ_BYTES),
        "from_l2_chunks": ledger.total(Count.L2_CHUNKS),
        "clean": not (unequal or fd_growth or failed or grows or what),
        "what": [*(f"{n}: server {s:.0f}, clients {c:.0f}" for n, s, c in unequal), *what],
    }
