"""Progress of long commands on stderr: one line that changes on a terminal, else plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY_S = 2.0


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield `say(text)`, which shows what is being done now."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as line:
            yield line.update
    else:
        yield _Plain()


class _Plain:
    """A line per change at most every `PLAIN_EVERY_S`, so that logs stay short."""

    def __init__(self) -> None:
        self._said_s = -PLAIN_EVERY_S

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = now_s
            print(text, file=sys.stderr, flush=True)
