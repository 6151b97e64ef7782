"""Processes that end with whoever started them, and a SIGTERM that ends as cleanly as Ctrl-C.

For what starts servers and engines of its own (benches, proofs, the demo): however it ends, nothing
of it may stay behind. A server that people start never uses this.
"""

import ctypes
import signal
from types import FrameType

_PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_with_parent() -> None:
    """In a new child, also as `preexec_fn`: the kernel kills it when its parent has ended."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def ends_like_ctrl_c() -> None:
    """From now on SIGTERM and SIGHUP raise `Ended` in the main thread, so that all is put away."""

    def end(number: int, _: FrameType | None) -> None:
        raise Ended(number)

    for number in ENDING:
        signal.signal(number, end)
