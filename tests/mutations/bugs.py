"""Bugs that a KV cache can have: each function plants one, until its patch is undone.

Those that the simulator's own tests plant are taken from there (tests/testing/test_simulate*.py).
"""

from collections.abc import Sequence
from typing import Any

import pytest

from kvkeep.backends.base import Item
from kvkeep.backends.breaker import Breaker
from kvkeep.backends.checked import Store
from kvkeep.core import common_prefix
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.core.quota import Quotas
from kvkeep.server.io import Io
from kvkeep.types import GroupKind, IoOutcome, RowSpec

Patch = pytest.MonkeyPatch


def freed_by_a_timer(patch: Patch) -> None:
    """What a lost session was writing is free at the next tick, though its process lives."""
    handle = Directory.handle

    def impatient(
        self: Directory, event: ev.Event, now_s: float
    ) -> tuple[ev.Reply, list[ev.Effect]]:
        for peer in self.peers.values() if isinstance(event, ev.Tick) else ():
            while peer.orphans:
                self.give_up(peer.orphans.pop(), peer.id, confirmed=True, now_s=now_s)
        return handle(self, event, now_s)

    patch.setattr(Directory, "handle", impatient)


def the_first_chunk_is_not_verified(patch: Patch) -> None:
    """The checksum of a prompt's first chunk is not looked at."""
    check = Store._check_payloads

    async def all_but_one(self: Store, items: Sequence[Item], verdicts: list[Any]) -> None:
        later = [n for n, item in enumerate(items) if item.depth > 0]
        found = [verdicts[n] for n in later]
        await check(self, [items[n] for n in later], found)
        for n, verdict in zip(later, found, strict=True):
            verdicts[n] = verdict

    patch.setattr(Store, "_check_payloads", all_but_one)


def a_quota_is_not_returned(patch: Patch) -> None:
    """What a tenant staged counts for it for ever, committed, aborted or lost."""
    staged = Quotas.staged

    def keeps(self: Quotas, salt: str | None, size_bytes: int) -> None:
        if size_bytes > 0:
            staged(self, salt, size_bytes)

    patch.setattr(Quotas, "staged", keeps)


def a_window_is_not_asked_for(patch: Patch) -> None:
    """The rows of sliding windows have no say in how long a hit is."""
    need_at = common_prefix.need_at

    def blind(spec: RowSpec, length: int) -> int:
        return 0 if spec.kind is GroupKind.SLIDING_WINDOW else need_at(spec, length)

    patch.setattr(common_prefix, "need_at", blind)


def persisted_is_said_before_it_is(patch: Patch) -> None:
    """The core hears OK when the write begins."""
    put = Io._put

    async def hasty(self: Io, effect: ev.Persist) -> Sequence[IoOutcome]:
        self._spawn(_only(put(self, effect)))
        return [IoOutcome.OK] * len(effect.offsets)

    patch.setattr(Io, "_put", hasty)


async def _only(work: Any) -> None:
    await work


def a_breaker_never_closes(patch: Patch) -> None:
    """A probe that works is taken for one that failed."""
    end_probe = Breaker.end_probe

    def never(self: Breaker, now_s: float, *, worked: bool) -> None:
        end_probe(self, now_s, worked=False)

    patch.setattr(Breaker, "end_probe", never)


def committed_in_the_failing_step(patch: Patch) -> None:
    """The reports of a step are believed before its failed loads are looked at."""
    from kvkeep.connectors.vllm.scheduler_side import SchedulerSide

    step_done = SchedulerSide.step_done

    def trusting(self: SchedulerSide, report: Any, invalid_blocks: set[int]) -> None:
        step_done(self, report, set())
        step_done(self, None, invalid_blocks)

    patch.setattr(SchedulerSide, "step_done", trusting)


def an_old_epochs_handle_is_accepted(patch: Patch) -> None:
    """A handle is used in whatever arena is mapped."""
    from kvkeep.connectors.vllm.worker_side import WorkerSide

    patch.setattr(WorkerSide, "_mapping", lambda self, epoch: self.client.mapping)
