"""The simulator finds nothing in the tree, the same twice, and finds what is planted."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvkeep.core import lookup
from kvkeep.core.arena import Arena
from kvkeep.core.directory import Directory
from kvkeep.core.leases import ReadLease, Session
from kvkeep.core.resident import Residents
from kvkeep.core.slots import SlotTable
from kvkeep.core.staging import Stager
from kvkeep.core.sweeping import Sweeper
from kvkeep.testing import simulate
from kvkeep.testing.engine import Engine
from kvkeep.testing.fake_client import FakeClient
from kvkeep.testing.worker import Worker
from kvkeep.types import Reason, SlotId, SlotState

SEEDS, MORE_SEEDS = 3, 60
SEEDS_FOR_A_BUG = 40  # a late grant comes in one seed of 15; most bugs show in the first few
SEEDS_TO_PROVE = 500

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.timeout(600)  # a busy machine takes its time


def test_some_seeds_are_clean() -> None:
    seen: list[tuple[int, int]] = []
    result = simulate.run(SEEDS, progress=lambda done, total: seen.append((done, total)))
    assert result["failures"] == []
    assert seen == [(n, SEEDS) for n in range(1, SEEDS + 1)]
    assert result["seeds"] == SEEDS
    assert result["events"] > SEEDS * 300


@pytest.mark.slow
def test_sixty_seeds_are_clean() -> None:
    result = simulate.run(MORE_SEEDS, jobs=2)
    assert result["failures"] == []
    copies = result["copies"]  # the run is worth nothing if nothing was moved or lost
    assert copies["store_done"] > 1500
    assert copies["store_refused"] > 0
    assert copies["load_done"] > 1500
    assert copies["load_stale"] > 0
    assert copies["load_failed"] > 0


@pytest.mark.slow
def test_the_same_seeds_give_the_same_digest_in_any_process() -> None:
    code = "from kvkeep.testing import simulate; print(simulate.run(2, 5, 200)['digest'])"
    here = simulate.run(2, 5, 200)
    assert here["failures"] == []
    assert simulate.run(2, 5, 200) == here
    assert simulate.run(2, 5, 200, jobs=2) == here
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == here["digest"]
    assert simulate.run(2, 6, 200)["digest"] != here["digest"]


def test_a_failure_says_how_to_see_it_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Directory, "give_up", _free_always)
    seed = -1
    failures: list[dict[str, Any]] = []
    while not failures:
        seed += 1
        assert seed < SEEDS_FOR_A_BUG
        failures = simulate.run(1, seed)["failures"]
    failure = failures[0]
    assert f"kvkeep simulate --first-seed {seed} --seeds 1" in failure["what"]
    assert failure["what"].startswith("AssertionError: ")
    again = simulate.run(1, seed)
    assert again["failures"] == [failure]


# ---- planted bugs


def _free_always(
    self: Directory, slot: SlotId, writer: int, *, confirmed: bool, now_s: float
) -> None:
    self.slots.move(slot, SlotState.FREE)


def no_generation_change(patch: Patch) -> None:
    move = SlotTable.move

    def same_word(self: SlotTable, slot: SlotId, to: SlotState) -> None:
        word = self.generations[slot]
        move(self, slot, to)
        self.generations[slot] = word

    patch.setattr(SlotTable, "move", same_word)


def free_on_close_instead_of_orphan(patch: Patch) -> None:
    patch.setattr(Directory, "give_up", _free_always)


def quarantine_is_skipped(patch: Patch) -> None:
    give_up = Directory.give_up

    def no_dma(self: Directory, slot: SlotId, writer: int, **how: Any) -> None:
        if (peer := self.peers.get(writer)) is not None:
            peer.dma = False
        give_up(self, slot, writer, **how)

    patch.setattr(Directory, "give_up", no_dma)


def commit_ignores_a_newer_resident(patch: Patch) -> None:
    commit = Stager.commit

    def last_wins(self: Stager, event: Any) -> Any:
        session = self._d.sessions.get(event.session)
        for lease_id in event.leases:
            lease = session.writes_open.get(lease_id) if session else None
            chunk = self._d.residents.index.get(lease.hash) if lease else None
            if chunk is not None:
                self._d.residents.unlink(chunk, Reason.EVICTED)
        return commit(self, event)

    patch.setattr(Stager, "commit", last_wins)


def evict_ignores_readers(patch: Patch) -> None:
    patch.setattr(Residents, "idle", lambda self, chunk: True)


def reservations_leak_on_connection_loss(patch: Patch) -> None:
    patch.setattr(Sweeper, "end_reads", lambda self, session, ranks: None)


def a_second_end_counts_again(patch: Patch) -> None:
    end_part = Directory.end_part

    def again(self: Directory, session: Session, lease: ReadLease, rank: int) -> bool:
        for chunk in lease.chunks:
            for slot in chunk.rows:
                if self.slots.readers[slot] > 1:
                    self.slots.readers[slot] -= 1
        return end_part(self, session, lease, rank)

    patch.setattr(Directory, "end_part", again)


def a_hit_skips_holes(patch: Patch) -> None:
    def resident(session: Session, held: Sequence[bool]) -> int:
        return max((position + 1 for position, there in enumerate(held) if there), default=0)

    patch.setattr(lookup, "usable", resident)


def free_bytes_are_lost(patch: Patch) -> None:
    free = Arena.free

    def shorter(self: Arena, extent: int) -> int:
        size_bytes = free(self, extent)
        self.free_bytes -= 4096 if size_bytes >= 3 * 4096 else 0
        return size_bytes

    patch.setattr(Arena, "free", shorter)


def epoch_is_not_checked(patch: Patch) -> None:
    patch.setattr(Worker, "right_epoch", lambda self, mapping, epoch: True)


def generation_is_not_compared(patch: Patch) -> None:
    patch.setattr(Worker, "unchanged", lambda self, mapping, parts: True)


def late_grants_are_kept(patch: Patch) -> None:
    patch.setattr(FakeClient, "_give_back", lambda self, message: None)


def tainted_chunks_are_committed(patch: Patch) -> None:
    settle = Engine._settle

    async def believe(self: Engine, staged: Any, reports: Any) -> None:
        for entry in staged:
            entry.request.tainted = False
        await settle(self, staged, reports)

    patch.setattr(Engine, "_settle", believe)


BUGS: tuple[Callable[[Patch], None], ...] = (
    no_generation_change,
    free_on_close_instead_of_orphan,
    quarantine_is_skipped,
    commit_ignores_a_newer_resident,
    evict_ignores_readers,
    reservations_leak_on_connection_loss,
    a_second_end_counts_again,
    a_hit_skips_holes,
    free_bytes_are_lost,
    epoch_is_not_checked,
    generation_is_not_compared,
    late_grants_are_kept,
    tainted_chunks_are_committed,
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    outcomes = (simulate.run_seed(seed) for seed in range(SEEDS_FOR_A_BUG))
    assert any(outcome.what for outcome in outcomes), "no seed noticed"


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_many_seeds_are_clean_and_meet_every_pair_and_every_fault() -> None:
    result = simulate.run(SEEDS_TO_PROVE, jobs=2)
    assert result["failures"] == []
    assert result["never"] == []
    assert not [pair for pair in result["impossible"] if result["coverage"][pair]]


def test_the_tables_name_what_was_not_met() -> None:
    result = simulate.run(1, 0, 50)
    tables = {**result["coverage"], **result["faults"]}
    zeros = {name for name, count in tables.items() if not count}
    assert set(result["never"]) == zeros - set(result["impossible"])
    assert {"l2 put after_close", "l2 get denied", "world KillServer"} <= tables.keys()
    assert set(result["impossible"]) <= tables.keys()
