"""A process that stores chunks, reserves them, and reads them when it is told.

`python -m tests.process.reader SOCKET SESSION REQUEST CHUNKS`: it says `held N`. `read` copies what
it holds and says how many were right and how many were lost; the end of its input ends it.
"""

import sys

from tests.process.engine import Engine


def main() -> None:
    """Hold, then obey."""
    path, session, request, chunks = sys.argv[1:]
    with Engine(path, session).wait_ready() as engine:
        engine.store(int(request), int(chunks))
        held = engine.lookup(int(request), int(chunks))
        print("held", len(held.keys), flush=True)
        for _ in sys.stdin:
            right, lost = engine.read(held)
            print(right, lost, flush=True)


if __name__ == "__main__":
    main()
