"""Processes made by fork: a client's child that must own nothing, and children that only work.

A child never returns into its parent's code: it ends with os._exit, and tells why when it failed.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from kvkeep.children import ENDING, end_with_parent
from kvkeep.client import Client, State
from kvkeep.errors import KVKeepError, MemoryRefused
from kvkeep.shm import Mapping
from kvkeep.testing.chaos_ledger import Story
from kvkeep.wire import messages as m

_ENDS_WITHIN_S = 20.0
_LOOK_S = 0.005


class ChildFailed(KVKeepError):
    """A forked child found what must not be, or did not end."""


def forked(work: Callable[[], None], story: Story, *, outlives: bool = False) -> int:
    """Run `work` in a child; its pid. The child ends with 0, or with 1 and a line in the story.

    It is killed with its parent, unless it `outlives` that.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, ENDING
    )  # its parent's handlers are not its own
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    code = 1
    try:
        if not outlives:
            end_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        work()
        code = 0
    finally:
        if code:
            story.tell(traceback.format_exc())
        os._exit(code)


def fork_and_look(client: Client, lives_s: float, story: Story) -> None:
    """Fork as an engine does. The child has nothing of the connection, and lives for a while."""

    mapping = client.mapping

    def child() -> None:
        owns_nothing(client, mapping)
        time.sleep(lives_s)

    pid = forked(child, story, outlives=True)  # as an engine's would be
    until_s = time.monotonic() + _ENDS_WITHIN_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until_s:
            raise ChildFailed(f"a forked child did not end within {_ENDS_WITHIN_S} s")
        time.sleep(_LOOK_S)
    if os.waitstatus_to_exitcode(status):
        raise ChildFailed("a forked child owns something of its parent's connection")


def owns_nothing(client: Client, mapping: Mapping | None) -> None:
    """In the child: the client is closed, and neither arena nor its descriptors are here."""
    assert client.state is State.CLOSED, client.state
    assert client.call(m.Ping) is None, "a forked child may call"
    client.notify(m.Bye())
    maps = Path("/proc/self/maps").read_text()
    assert "kvkeep-arena" not in maps, "the arena is mapped in a forked child"
    kept = [target for target in open_files("self") if "memfd:kvkeep-" in target]
    assert not kept, f"a forked child has {kept}"
    if mapping is not None:
        try:
            with mapping.use():
                raise ChildFailed("a forked child may use the mapping")
        except MemoryRefused:
            return


def open_files(pid: int | str) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or closed since
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
