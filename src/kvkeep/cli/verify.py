"""`kvkeep verify`: reads every object of an `fs` L2 and says which are not what they claim to be.

Takes no lock and needs no server: it can run beside one. Each file is compared with its own name
and place, its own header and its checksum. An encrypted object needs its key for that: without it
only its header is looked at, and it counts as unchecked: no success either. An object that leaves
while the scrub looks at it is no error. With `quarantine`, broken ones are set aside; a running
server notices by itself. One that cannot be set aside ends nothing: the report names it.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvkeep.backends import registry
from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.encrypted import BUFFER_BYTES, Sealer, sealers
from kvkeep.backends.fs_files import Direct, Files, set_aside
from kvkeep.backends.fs_place import IDENTITY, Place
from kvkeep.backends.fs_scan import Found, listing, object_path, shards
from kvkeep.backends.header import Header, HeaderProblem, associated, checksum, decode, size_problem
from kvkeep.backends.registry import BackendUrl
from kvkeep.cli.progress import progress
from kvkeep.cli.settings import print_json
from kvkeep.errors import BackendError
from kvkeep.limits import format_bytes

VANISHED = "vanished"
_LEAST_BUFFER_BYTES = 8 << 20
_LOOKS = 4  # at one file, while a server replaces it

Say = Callable[[str], None]


@dataclass(slots=True)
class Report:
    """What a scrub found."""

    backend: str
    objects: int = 0
    bytes: int = 0
    broken: list[dict[str, str]] = field(default_factory=list)
    not_moved: list[dict[str, str]] = field(default_factory=list)  # though it should have been
    foreign_files: int = 0
    unchecked: int = 0  # encrypted, and the key is not here
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "backend": self.backend,
            "objects": self.objects,
            "bytes": self.bytes,
            "broken": self.broken,
            "not_moved": self.not_moved,
            "foreign_files": self.foreign_files,
            "unchecked": self.unchecked,
            "seconds": round(self.seconds, 3),
        }


def run(
    url_text: str, *, quarantine: bool = False, key_file: str = "", as_json: bool = False
) -> int:
    """The command: scrub with progress, print, and return the exit code. Raises KVKeepError."""
    with progress() as say:
        report = scrub(url_text, quarantine=quarantine, key_file=key_file, say=say)
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    return 1 if report.broken or report.unchecked else 0


def scrub(url_text: str, *, quarantine: bool, say: Say, key_file: str = "") -> Report:
    """Read all of the L2 at the URL, or in the plain directory. Raises KVKeepError.

    `quarantine` moves what is broken aside.
    """
    url = _url(url_text)
    sealer = sealers(key_file, BUFFER_BYTES, "--key-file")
    place = _opened(Path(url.path))
    started = time.monotonic()
    report = Report(url.name)
    try:
        scrubber = _Scrubber(place, None if sealer is None else sealer())
        _scrub(scrubber, report, quarantine=quarantine, say=say)
    except OSError as error:
        raise BackendError(f"{place.root} cannot be read to its end: {error}") from error
    report.seconds = time.monotonic() - started
    return report


def _url(text: str) -> BackendUrl:
    if not text.strip():
        raise BackendError("no place is named: give the directory of an L2, or its fs:// URL")
    url = BackendUrl(text if "://" in text else f"fs://{quote(str(Path(text).absolute()))}")
    if url.scheme != "fs":
        raise BackendError(f"{url.public}: only fs can be verified; name an fs:// URL")
    registry.backend(url)  # refuses what a server refuses, such as a relative path
    return url


def _show(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvkeep.cli.show import PIPE_COLUMNS

    # In a pipe there is no width: lines that wrap would break what people grep for.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    for head, rows in (("broken", report.broken), ("not moved", report.not_moved)):
        table = Table(head, "why", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for row in rows:
            table.add_row(Text(row["path"], overflow="fold"), Text(row["why"], style="red"))
        if rows:
            console.print(table)
    foreign = f", {report.foreign_files} foreign files" if report.foreign_files else ""
    left = f", {len(report.not_moved)} could not be moved" if report.not_moved else ""
    unchecked = f", {report.unchecked} not checked (no key for them)" if report.unchecked else ""
    console.print(
        f"{report.objects} objects, {format_bytes(report.bytes)} read in {report.seconds:.1f} s: "
        f"{len(report.broken)} broken{left}{unchecked}{foreign}"
    )
    if report.unchecked:
        console.print("name the file that has the keys of what was not checked with --key-file")


def _opened(root: Path) -> Place:
    try:
        place = Place(root, os.open(root, os.O_RDONLY | os.O_DIRECTORY))
        os.stat(IDENTITY, dir_fd=place.fd)
    except FileNotFoundError as error:
        raise BackendError(
            f"{root} is no L2 of kvkeep: it has no {IDENTITY}; name the directory of an fs:// URL"
        ) from error
    except OSError as error:
        raise BackendError(f"{root} cannot be opened: {error.strerror}") from error
    return place


def _scrub(scrubber: "_Scrubber", report: Report, *, quarantine: bool, say: Say) -> None:
    place = scrubber.place
    folders, report.foreign_files = shards(place)
    for number, (label, shard) in enumerate(folders):
        listed = listing(place, label, shard)
        report.foreign_files += listed.foreign
        for found in listed.found:
            percent = 100 * number // len(folders)
            say(f"{percent} %: {report.objects} objects, {format_bytes(report.bytes)}")
            why = scrubber.problem(label, found)
            if why == VANISHED:
                continue
            report.objects += 1
            report.bytes += found.size
            if why == HeaderProblem.NO_KEY:
                report.unchecked += 1
            elif why is not None:
                path = object_path(label, found.key)
                report.broken.append({"path": path, "why": why})
                if quarantine:
                    _set_aside(place, report, path)


def _set_aside(place: Place, report: Report, path: str) -> None:
    try:
        set_aside(place, path)
    except OSError as error:
        report.not_moved.append({"path": path, "why": error.strerror or str(error)})
    except BackendError as error:
        report.not_moved.append({"path": path, "why": str(error)})


class _Scrubber:
    """Reads one object at a time into the same memory."""

    def __init__(self, place: Place, sealer: Sealer | None) -> None:
        self.place = place
        self._sealer = sealer
        self._files = Files(Direct.AUTO)
        self._memory = memoryview(mmap.mmap(-1, _LEAST_BUFFER_BYTES))

    def problem(self, label: str, found: Found) -> str | None:
        """What is wrong with a file, as one word; None when it is sound."""
        path = object_path(label, found.key)
        length = max(0, found.size - HEADER_BYTES)
        size = ABSENT
        for _ in range(_LOOKS):
            header, payload = self._room_for(length)
            size = self._files.read(self.place, path, (header, payload), length, value_ns=None)
            if size in (length, ABSENT):
                break
            length = size  # replaced since it was listed
        if size == ABSENT:
            return VANISHED
        page = decode(header)
        if isinstance(page, HeaderProblem):
            return (page if size > 0 else HeaderProblem.TRUNCATED).value
        if page.key != found.key or page.label != label:
            return HeaderProblem.WRONG_KEY.value
        wrong = size_problem(page, size)
        if wrong is None and size != length:
            wrong = HeaderProblem.PAYLOAD_CHECKSUM
        wrong = wrong or self._content_problem(page, associated(header), payload[:length])
        return None if wrong is None else wrong.value

    def _content_problem(
        self, page: Header, bound: bytes, payload: memoryview
    ) -> HeaderProblem | None:
        if page.seal is None:
            right = checksum(payload) == page.checksum
            return None if right else HeaderProblem.PAYLOAD_CHECKSUM
        if self._sealer is None or self._sealer.problem(page) is not None:
            return HeaderProblem.NO_KEY
        return None if self._sealer.opens(page, bound, payload) else HeaderProblem.TAG

    def _room_for(self, length: int) -> tuple[memoryview, memoryview]:
        needed = HEADER_BYTES + -(-length // PAGE_BYTES) * PAGE_BYTES
        if needed > len(self._memory):
            self._memory = memoryview(mmap.mmap(-1, needed))
        return self._memory[:HEADER_BYTES], self._memory[HEADER_BYTES:needed]
