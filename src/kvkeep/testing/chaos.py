"""`kvkeep chaos`: real processes are killed, stopped and continued at random under load.

A server with a small arena and an L2 on disk, and clients that store, look up, read and verify; all
of them are struck from a seed, and replaced. A miss is never wrong; a wrong byte, a failed or
hanging operation, and anything left over at the end is. Times make a run differ from its repetition
with the same seed: only the strikes are the same.
"""

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.testing.chaos_after import Findings, look_after_stop, look_at_quiet
from kvkeep.testing.chaos_client import ChaosClient, Habits, Layout, Orders
from kvkeep.testing.chaos_fork import forked
from kvkeep.testing.chaos_hands import Place, ServerHand, stopped_for_s
from kvkeep.testing.chaos_health import HealthWatch
from kvkeep.testing.chaos_ledger import Count, Ledger, Story
from kvkeep.testing.chaos_server import RealServer, ServerBroke, Size, until

LAYOUTS = (Layout("chaos-a", (64 << 10,)), Layout("chaos-b", (48 << 10, 10_000)))
WARM_S = 1.0  # of one client, before the server's descriptors are counted
SERVER_STRIKES = (
    *(signal.SIGKILL, signal.SIGKILL, signal.SIGKILL),
    *(signal.SIGTERM, signal.SIGSTOP, signal.SIGSTOP),
)
LAST_LIFE_SHARE = 0.25  # of the time: the server lives on, so that what it loses adds up
ENDS_S = 60.0  # the most that clients and the last strikes may take to end
_LOOK_S = 0.01
_MOST_LINES = 20  # of what went wrong, in the report

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, from which seed, how many clients, and how often something is struck."""

    minutes: float
    seed: int = 0
    clients: int = 4
    client_strikes_per_s: float = 3.0
    server_strikes_per_s: float = 0.35


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """The whole run; the report of `kvkeep chaos --json`. Raises ServerBroke if it cannot begin."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-chaos-") as folder, ExitStack() as stack:
        story = Story(Path(folder) / "story")
        server = RealServer(Path(folder), Size())
        stack.callback(server.end)
        health = HealthWatch(story)
        stack.callback(health.close)
        chaos = Chaos(plan, server, health, story)
        stack.callback(chaos.end_clients)
        return chaos.run(say)


class Chaos:
    """One run."""

    def __init__(self, plan: Plan, server: RealServer, health: HealthWatch, story: Story) -> None:
        self._plan, self._server, self._health, self._story = plan, server, health, story
        self._rng = random.Random(plan.seed)
        self._ledger = Ledger(plan.clients + 1)  # the last row is our own
        self._strikes: Counter[str] = Counter()
        self._bag: list[signal.Signals] = []
        self._hand = ServerHand(server, health, story)
        rows = zip(range(plan.clients), self._ledger.rows, strict=False)
        self._places = [Place(f"client{n}", *_kind(n), row=row, story=story) for n, row in rows]

    def run(self, say: Say) -> dict[str, Any]:
        """Load and strikes, then the end, then the report."""
        say("starting a server")
        self._server.start()
        self._server.wait_whole()
        self._one_client(LAYOUTS[0], lambda client: client.work(_after(WARM_S)))
        base = self._settled_descriptors()
        minutes = self._strike(say)
        say("the load has ended: looking at what is left")
        try:
            found = self._aftermath(base)
        except ServerBroke as error:
            found = Findings(what=[str(error)])
        return self._report(minutes, found)

    def end_clients(self) -> None:
        """No process of ours stays, however the run ended."""
        for place in self._places:
            if place.pid:
                place.kill()
                until(lambda place=place: self._gone(place), ENDS_S, lambda: "a client stays")  # type: ignore[misc]

    def _gone(self, place: Place) -> bool:
        place.reap(Counter())
        return not place.pid

    # ---- under load

    def _strike(self, say: Say) -> float:
        """Until the time is over; minutes that it was."""
        rng, plan = self._rng, self._plan
        started_s = now_s = time.monotonic()
        until_s = started_s + 60 * plan.minutes
        client_s, server_s = (
            now_s + rng.expovariate(rate)
            for rate in (plan.client_strikes_per_s, plan.server_strikes_per_s)
        )
        while (now_s := time.monotonic()) < until_s:
            self._look()
            if now_s >= client_s:
                self._strike_client()
                client_s = now_s + rng.expovariate(plan.client_strikes_per_s)
            if now_s >= server_s and self._hand.strikable:
                dies = now_s < until_s - LAST_LIFE_SHARE * 60 * plan.minutes
                self._strike_server(dies=dies)
                server_s = now_s + rng.expovariate(plan.server_strikes_per_s)
            say(self._progress(now_s - started_s))
            time.sleep(_LOOK_S)
        return (time.monotonic() - started_s) / 60

    def _look(self, *, refill: bool = True) -> None:
        self._hand.look(self._rng, self._strikes)
        for place in self._places:
            place.go_on()
            place.reap(self._strikes)
            if refill and not place.pid:
                place.fill(str(self._server.socket), self._rng)

    def _strike_client(self) -> None:
        able = [place for place in self._places if place.strikable]
        if not able:
            return
        place, roll = self._rng.choice(able), self._rng.random()
        if roll < 0.55:
            place.kill()
        elif roll < 0.7:
            place.end()
        else:
            place.stop(stopped_for_s(self._rng))
            self._strikes["client_sigstop"] += 1

    def _strike_server(self, *, dies: bool) -> None:
        if not self._bag:  # every kind comes, in a short run too
            self._bag = self._rng.sample(SERVER_STRIKES, len(SERVER_STRIKES))
        match self._bag.pop():
            case signal.SIGKILL if dies:
                self._hand.kill()
            case signal.SIGTERM if dies:
                self._hand.end()
            case _:
                self._hand.stop(stopped_for_s(self._rng))
                self._strikes["server_sigstop"] += 1

    # ---- the end

    def _aftermath(self, base: Counter[str]) -> Findings:
        """Everybody goes; then nothing may be left."""
        until(self._server_is_back, ENDS_S, self._server.log_end)
        for place in self._places:
            if place.pid:
                place.end()
        until(self._nobody_left, ENDS_S, lambda: "clients do not end")
        for layout in LAYOUTS:
            self._one_client(layout, ChaosClient.sweep)
        quiet = look_at_quiet(self._server, base)
        self._health.pause()
        groups = [group for place in self._places for group in place.groups]
        after = look_after_stop(self._server, groups)
        return Findings(quiet.leaked_bytes + after.leaked_bytes, quiet.what + after.what)

    def _server_is_back(self) -> bool:
        self._look(refill=False)
        return self._hand.strikable

    def _nobody_left(self) -> bool:
        self._look(refill=False)
        return not any(place.pid for place in self._places)

    def _one_client(self, layout: Layout, work: Callable[[ChaosClient], None]) -> None:
        """A client that nobody strikes, from its start to its end."""
        row, story = self._ledger.rows[-1], self._story
        orders = Orders(str(self._server.socket), "unharmed", layout, Habits(), self._plan.seed)

        def live() -> None:
            client = ChaosClient(orders, row, story)
            work(client)
            client.close()

        place = Place("unharmed", layout, Habits(), row=row, story=story)
        place.adopt(forked(live, story))
        until(lambda: self._gone(place), 4 * ENDS_S, lambda: "the unharmed client does not end")

    def _settled_descriptors(self) -> Counter[str]:
        until(lambda: not self._server.status()["sessions"], ENDS_S, self._server.log_end)
        return self._server.descriptors()

    # ---- what is said

    def _kills(self) -> int:
        return sum(count for name, count in self._strikes.items() if not name.endswith("stop"))

    def _stops(self) -> int:
        return sum(count for name, count in self._strikes.items() if name.endswith("stop"))

    def _failed(self) -> int:
        return self._ledger.total(Count.FAILED) + self._hand.failed + self._health.bad

    def _progress(self, done_s: float) -> str:
        total = self._ledger.total
        return (
            f"{done_s:.0f} of {60 * self._plan.minutes:.0f} s: {self._kills()} kills, "
            f"{self._stops()} stops, {total(Count.OPERATIONS)} operations, "
            f"{total(Count.RIGHT_CHUNKS)} chunks verified, {total(Count.WRONG_BYTES)} wrong bytes, "
            f"{self._failed()} failed"
        )

    def _report(self, minutes: float, found: Findings) -> dict[str, Any]:
        total, lines = self._ledger.total, self._story.lines()
        return {
            "minutes": round(minutes, 2),
            "kills": self._kills(),
            "stops": self._stops(),
            "wrong_bytes": total(Count.WRONG_BYTES),
            "leaked_bytes": found.leaked_bytes,
            "failed_requests": self._failed() + len(found.what),
            "max_healthz_s": round(self._health.longest_s, 4),
            "max_healthz_run_s": round(self._health.longest_run_s, 4),
            "healthz_answers": self._health.answers,
            "seed": self._plan.seed,
            "strikes": dict(sorted(self._strikes.items())),
            "server_lives": self._server.lives,
            "operations": total(Count.OPERATIONS),
            "without_server": total(Count.AWAY),
            "verified_chunks": total(Count.RIGHT_CHUNKS),
            "verified_from_l2": total(Count.L2_CHUNKS),
            "lost_loads": total(Count.LOST_CHUNKS),
            "longest_operation_s": round(self._ledger.most(Count.LONGEST_NS) / 1e9, 3),
            "forks": total(Count.FORKS),
            "what": [*found.what, *lines[:_MOST_LINES]],
        }


def _kind(number: int) -> tuple[Layout, Habits]:
    """Most clients share one layout; every third has the other, and resets and clears things."""
    if number % 3 == 2:
        return LAYOUTS[1], Habits(forget=1, drop=1, clear=0.3)
    return LAYOUTS[0], Habits(drop=1)


def _after(seconds: float) -> Callable[[], bool]:
    """True once so much time has passed."""
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s
