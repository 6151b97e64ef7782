"""The folder of one run with real engines, and how the run ends when it is told to end.

The folder holds the control socket and the children's logs. It goes when the run went well, and
stays, and is named, when it did not.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_MAX_FOLDER_CHARACTERS = 80  # a socket's path has room for about 100
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A private folder with a short path."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder)) > _MAX_FOLDER_CHARACTERS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    try:
        yield folder
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        print(f"kvkeep: logs of the server and the engines: {folder}/*.log", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal do what Ctrl-C does, so that children are ended first."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
