"""Rebuilds the `fs` backend's index at start: a walk in a thread, taken over in small slices.

Serving goes on meanwhile; only stores are refused, since nobody knows yet what is used. The walk
never runs ahead of the loop by more than a few slices, and starts over when the disk fails.
"""

import asyncio
import contextlib
import threading
from functools import partial

from kvkeep.backends import fs_scan
from kvkeep.backends.base import HEADER_BYTES
from kvkeep.backends.fs_held import Held, first_part
from kvkeep.backends.fs_scan import SLICE, Found
from kvkeep.errors import BackendError

AGAIN_S = 5.0
AHEAD = 4  # slices
SAY_AGAIN_S = 1.0
_TENTHS = 10
_SHRINK_BYTES = 64 << 20


async def rebuild(held: Held) -> None:
    """Fill the index from the disk and set `held.complete`; cancelled when the backend closes."""
    while True:
        walk = _Walk(held)
        try:
            await _one_pass(held, walk)
        except (OSError, BackendError) as error:
            held.failed("scan", error)
            await asyncio.sleep(AGAIN_S)
        else:
            return
        finally:
            walk.stop()


async def _one_pass(held: Held, walk: "_Walk") -> None:
    place, chores = held.place, held.pools.chores
    foreign = 0
    if not place.read_only:
        foreign += await chores.run(partial(fs_scan.clear_temporaries, place))
    await chores.run(walk.run)
    await held.count_quarantine()
    if not place.read_only:
        await held.empty_trash(await chores.run(partial(fs_scan.trash_names, place)), 0)
        foreign += len(await chores.run(partial(fs_scan.trash_names, place)))
    held.foreign += foreign + held.quarantine_foreign
    await held.deletions()
    await _shrink(held)
    held.changed.clear()
    held.scanned = 1.0
    held.complete.set()
    fields = {
        "place": str(place.root),
        "objects": held.index.objects,
        "used_bytes": held.room.used_bytes,
        "capacity_bytes": held.room.capacity_bytes,
        "foreign": held.foreign or None,
    }
    held.log.info(
        "l2_scanned", extra={"fields": {k: v for k, v in fields.items() if v is not None}}
    )


async def _shrink(held: Held) -> None:
    """The capacity is smaller than last time: evict, a little at a time."""
    room = held.room
    while (too_much := room.used_bytes - room.capacity_bytes) > 0:
        before = room.used_bytes
        await held.make_space(min(too_much, _SHRINK_BYTES))
        if room.used_bytes >= before:
            return


class _Walk:
    """One pass over the directory."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._ahead = threading.Semaphore(AHEAD)
        self._stopped = False
        self._tenth = 0
        self._said_s = self._loop.time()

    def stop(self) -> None:
        """From the loop: the thread ends before its next slice."""
        self._stopped = True
        self._ahead.release()

    def run(self) -> None:
        """In a thread: list every directory and hand it over. Raises OSError."""
        shards, foreign = fs_scan.shards(self._held.place)
        for number, (label, shard) in enumerate(shards, start=1):
            listing = fs_scan.listing(self._held.place, label, shard)
            foreign += listing.foreign
            slices = range(0, max(1, len(listing.found)), SLICE)
            for start in slices:
                share = number / len(shards) if start == slices[-1] else None
                self._hand_over(label, listing.found[start : start + SLICE], share)
                if self._stopped:
                    return
        self._held.foreign = foreign

    def _hand_over(self, label: str, found: list[Found], share: float | None) -> None:
        self._ahead.acquire()
        if not self._stopped:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take, label, found, share)

    def _take(self, label: str, found: list[Found], share: float | None) -> None:
        self._ahead.release()
        held = self._held
        if self._stopped or held.forgets[first_part(label)]:
            found = []
        for key, file_bytes, mtime_ns in found:
            if (label, key) in held.changed or held.index.find(label, key) is not None:
                continue
            entry = held.index.add(label, key, max(0, file_bytes - HEADER_BYTES), mtime_ns)
            held.room.found(entry.disk_bytes)
        if share is not None:
            held.scanned = min(share, 0.999)  # 1.0 says that everything is done
            self._say(share)

    def _say(self, share: float) -> None:
        now_s = self._loop.time()
        if int(share * _TENTHS) > self._tenth and now_s - self._said_s >= SAY_AGAIN_S:
            self._said_s = now_s
            self._tenth = int(share * _TENTHS)
            fields = {
                "place": str(self._held.place.root),
                "share": round(share, 2),
                "objects": self._held.index.objects,
            }
            self._held.log.info("l2_scanning", extra={"fields": fields})
