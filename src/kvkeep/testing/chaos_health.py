"""Asks /healthz all the time, in a process of its own, and keeps the longest answer.

Only while it counts: `count(url)` says from when on the server at this URL must answer, `pause()`
that something is done to it. A question that was under way when that changed is not judged.
"""

import http.client
import json
import mmap
import os
import signal
import time
from enum import IntEnum
from types import FrameType
from urllib.parse import urlsplit

from kvkeep.testing.chaos_fork import forked
from kvkeep.testing.chaos_ledger import Story

PAUSE_S = 0.05
SETTLED_S = 2.0  # after a start: from then on it counts
ANSWER_S = 10.0
_WORDS = 8


class _Word(IntEnum):
    EPISODE = 0  # changes with everything that is done to the server
    PORT = 1  # 0: not now
    FROM_NS = 2
    LONGEST_NS = 3
    LONGEST_RUN_NS = 4  # without time in which asker or server waited for a core
    ANSWERS = 5
    BAD = 6
    PID = 7


class HealthWatch:
    """The asker's process and the memory it shares with us. End it with `close`."""

    def __init__(self, story: Story) -> None:
        self._memory = mmap.mmap(-1, _WORDS * 8)
        self._words = memoryview(self._memory).cast("Q")
        self._story = story
        self._pid = forked(self._ask_for_ever, story)

    def count(self, url: str, pid: int, *, after_s: float = SETTLED_S) -> None:
        """The server at this URL must answer from `after_s` on."""
        self._words[_Word.FROM_NS] = time.monotonic_ns() + int(after_s * 1e9)
        self._words[_Word.PID] = pid
        self._words[_Word.PORT] = urlsplit(url).port or 0
        self._words[_Word.EPISODE] += 1

    def pause(self) -> None:
        """Something is done to the server now."""
        self._words[_Word.EPISODE] += 1
        self._words[_Word.PORT] = 0

    @property
    def longest_s(self) -> float:
        """Of all answers that count."""
        return self._words[_Word.LONGEST_NS] / 1e9

    @property
    def longest_run_s(self) -> float:
        """The same, without time in which the machine ran others."""
        return self._words[_Word.LONGEST_RUN_NS] / 1e9

    @property
    def answers(self) -> int:
        """How many counted."""
        return self._words[_Word.ANSWERS]

    @property
    def bad(self) -> int:
        """Questions without a good answer, though it should have been there."""
        return self._words[_Word.BAD]

    def close(self) -> None:
        """End the asker."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)

    # ---- in the asker's process

    def _ask_for_ever(self) -> None:
        signal.signal(signal.SIGTERM, _end)
        words = self._words
        while True:
            time.sleep(PAUSE_S)
            episode, port = words[_Word.EPISODE], words[_Word.PORT]
            if not port or time.monotonic_ns() < words[_Word.FROM_NS]:
                continue
            self._ask_once(episode, port, words[_Word.PID])

    def _ask_once(self, episode: int, port: int, pid: int) -> None:
        words = self._words
        started_ns, queued_ns = time.monotonic_ns(), _queued_ns(pid)
        why = _health(port)
        took_ns = time.monotonic_ns() - started_ns
        queued_ns = _queued_ns(pid) - queued_ns
        if episode != words[_Word.EPISODE]:
            return
        words[_Word.ANSWERS] += 1
        words[_Word.LONGEST_NS] = max(took_ns, words[_Word.LONGEST_NS])
        run_ns = max(0, took_ns - max(0, queued_ns))
        words[_Word.LONGEST_RUN_NS] = max(run_ns, words[_Word.LONGEST_RUN_NS])
        if why:
            words[_Word.BAD] += 1
            self._story.tell(f"/healthz of {pid} after {took_ns / 1e9:.3f} s: {why}")


def _health(port: int) -> str:
    """What is wrong with the answer; empty: nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read()
        good = answer.status == 200 and json.loads(body) == {"status": "ok"}
        return "" if good else f"{answer.status} {body!r}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _queued_ns(pid: int) -> int:
    """How long the server's loop and this thread were ready to run and did not."""
    total = 0
    for thread in (f"{pid}/task/{pid}", "thread-self"):
        try:
            with open(f"/proc/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except OSError:  # it is gone
            return 0
    return total


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)
