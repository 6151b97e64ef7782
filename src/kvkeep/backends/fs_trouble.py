"""What the `fs` backend says about its disk: one line when a trouble begins, and one when it ends.

A disk that is full or read-only fails every write; people need to hear it once. A full disk is over
when nothing has failed for a while: near the edge, writes fail and succeed in turns.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvkeep.limits import format_bytes

READ_ONLY_AGAIN_NS = 10_000_000_000  # a place that turned read-only is written to again
FULL_ENDS_NS = 60_000_000_000  # without one failure for lack of room


class Trouble:
    """Of one root. `clock` gives wall nanoseconds."""

    def __init__(self, root: Path, log: logging.Logger, clock: Callable[[], int]) -> None:
        self._root = root
        self._log = log
        self._clock = clock
        self._read_only = ""
        self._read_only_until_ns = 0
        self._look_ns = 0
        self._full = ""
        self._full_at_ns = 0
        self._too_large: set[int] = set()

    @property
    def text(self) -> str:
        """What is wrong now."""
        return self._read_only or self._full

    @property
    def read_only(self) -> bool:
        """It turned read-only a moment ago; after that it is tried again."""
        return bool(self._read_only) and self._clock() < self._read_only_until_ns

    def may_look(self) -> bool:
        """Whether it is time to look again at a place that was opened read-only."""
        if self._clock() < self._look_ns:
            return False
        self._look_ns = self._clock() + READ_ONLY_AGAIN_NS
        return True

    def is_read_only(self, error: OSError) -> None:
        """A write failed for this."""
        self._read_only_until_ns = self._clock() + READ_ONLY_AGAIN_NS
        if not self._read_only:
            self._read_only = f"store: {os.strerror(error.errno or 0)}"
            self._warn("l2_read_only", error=self._read_only)

    def is_writable(self) -> None:
        """A write succeeded."""
        if self._read_only:
            self._read_only = ""
            self._log.info("l2_writable", extra={"fields": {"place": str(self._root)}})

    def is_full(self, used_bytes: int, capacity_bytes: int) -> None:
        """A write failed for lack of room though there is some by our count."""
        self._full_at_ns = self._clock()
        if not self._full:
            self._full = (
                f"the disk is full at {format_bytes(used_bytes)} of capacity "
                f"{format_bytes(capacity_bytes)}: set capacity to less"
            )
            self._warn(
                "l2_disk_full",
                used_bytes=used_bytes,
                capacity_bytes=capacity_bytes,
                error=self._full,
            )

    def has_room(self) -> None:
        """A write succeeded."""
        if self._full and self._clock() - self._full_at_ns >= FULL_ENDS_NS:
            self._full = ""
            self._log.info("l2_disk_has_room", extra={"fields": {"place": str(self._root)}})

    def is_too_large(self, object_bytes: int, capacity_bytes: int) -> None:
        """An object that can never be stored: said once for each power of two."""
        size_class = object_bytes.bit_length()
        if size_class not in self._too_large:
            self._too_large.add(size_class)
            self._warn(
                "l2_object_too_large", object_bytes=object_bytes, capacity_bytes=capacity_bytes
            )

    def is_above_disk(self, capacity_bytes: int, disk_bytes: int) -> None:
        """The capacity can never be used."""
        why = "the disk is smaller than the capacity: set capacity to less"
        self._warn(
            "l2_capacity_above_disk", capacity_bytes=capacity_bytes, disk_bytes=disk_bytes, why=why
        )

    def _warn(self, event: str, **fields: int | str) -> None:
        self._log.warning(event, extra={"fields": {"place": str(self._root), **fields}})
