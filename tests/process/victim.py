"""An engine process that stores and loads as fast as it can until it is killed.

`python -m tests.process.victim SOCKET SEED DOOM`: DOOM names the point at which it kills itself
with SIGKILL (after a random count), or is `none`. It says `up` when it works, and ends with status
3 when it read wrong bytes.
"""

import os
import random
import signal
import sys
from typing import NoReturn

from tests.process.engine import Engine, WrongBytes

from kvkeep.errors import KVKeepError, MemoryRefused, ServerAway

POINTS = ("stage", "copy", "commit", "lookup", "read", "release")
REQUESTS = 40
WRONG_BYTES = 3
MOST_PASSES = 12


class Doom:
    """Counts the passes of one point, and dies at the last."""

    def __init__(self, point: str, passes: int) -> None:
        self._point = point
        self._left = passes

    def __call__(self, point: str) -> None:
        """Pass a point."""
        if point != self._point:
            return
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> NoReturn:
    """Work for ever."""
    path, seed, doom = sys.argv[1:]
    rng = random.Random(seed)
    engine = Engine(path, f"victim-{seed}", point=Doom(doom, rng.randint(1, MOST_PASSES)))
    engine.wait_ready()
    print("up", flush=True)
    while True:
        request = rng.randrange(REQUESTS)
        try:
            if rng.random() < 0.5:
                engine.store(request, rng.randint(1, 8))
            else:
                engine.load(request)
        except WrongBytes as error:
            print(error, flush=True)
            sys.exit(WRONG_BYTES)
        except (ServerAway, MemoryRefused):
            continue
        except KVKeepError as error:
            sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
