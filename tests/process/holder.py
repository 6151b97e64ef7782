"""A process that stages chunks and keeps them, doing what it is told, one word a line.

`python -m tests.process.holder SOCKET SESSION REQUEST CHUNKS`: it says `held N`. `close` closes the
socket and nothing else; `commit` publishes; the end of its input ends it.
"""

import sys

from tests.process.engine import chain, hello
from tests.process.peer import Peer

from kvkeep.core.keys import root_hash
from kvkeep.types import Fingerprint
from kvkeep.wire import messages as m


def main() -> None:
    """Stage, then obey."""
    path, session, request, chunks = sys.argv[1:]
    peer = Peer.at(path)
    peer.hello(hello(session))
    ready: m.Ready = peer.expect(m.Ready)
    root = root_hash(Fingerprint(ready.fingerprint))
    item = m.StageItem(request, root, b"".join(chain(root, int(request), int(chunks))))
    peer.send(m.Stage(1, (item,)))
    granted: m.Granted = peer.expect(m.Granted)
    print("held", len(granted.leases), flush=True)
    for line in sys.stdin:
        if line.strip() == "close":
            peer.close()
        else:
            peer.send(m.Commit(2, granted.leases))
            print(peer.expect(m.Committed).outcomes.hex(), flush=True)
        print("done", flush=True)


if __name__ == "__main__":
    main()
