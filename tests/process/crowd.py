"""A process with very many connections, each a session of its own that holds something.

`python -m tests.process.crowd SOCKET CLIENTS`: every client stores a chunk, finds it and the one
that the first client stored, and keeps both reserved and another chunk staged. It says `held N` and
stays until it is killed.
"""

import hashlib
import resource
import sys

from tests.process.engine import ANSWER_S, hello
from tests.process.peer import Peer

from kvkeep.core.keys import root_hash
from kvkeep.types import CommitOutcome, Fingerprint, GroupKind, RowSpec, StageOutcome
from kvkeep.wire import messages as m

PAGE = 4096
SPEC = (RowSpec(0, GroupKind.FULL_ATTENTION, PAGE),)
GRANTED, COMMITTED = bytes([StageOutcome.GRANTED]), bytes([CommitOutcome.COMMITTED])


def key(name: str) -> bytes:
    """The hash of a chunk."""
    return hashlib.sha256(name.encode()).digest()


def main() -> None:
    """All of them, then silence."""
    path, clients = sys.argv[1], int(sys.argv[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    peers = [_join(path, number) for number in range(clients)]
    for number, (peer, root) in enumerate(peers):  # everybody's calls are under way at once
        peer.send(m.Stage(1, (m.StageItem("kept", root, key(f"kept {number}")),)))
        peer.send(m.Stage(2, (m.StageItem("open", root, key(f"open {number}")),)))
    for number, (peer, _) in enumerate(peers):
        kept: m.Granted = peer.expect(m.Granted)
        still_open: m.Granted = peer.expect(m.Granted)
        assert kept.outcomes == still_open.outcomes == GRANTED
        peer.send(m.Commit(3, kept.leases))
        peer.send(m.Lookup(4, "own", key(f"kept {number}")))
    for peer, _ in peers:
        committed: m.Committed = peer.expect(m.Committed)
        assert committed.outcomes == COMMITTED
        found: m.Found = peer.expect(m.Found)
        assert (found.seq, found.chunks) == (4, 1)
        peer.send(m.Lookup(5, "shared", key("kept 0")))
    for peer, _ in peers:
        shared: m.Found = peer.expect(m.Found)
        assert (shared.seq, shared.chunks) == (5, 1)
    print("held", clients, flush=True)
    sys.stdin.read()


def _join(path: str, number: int) -> tuple[Peer, bytes]:
    peer = Peer.at(path)
    peer.sock.settimeout(6 * ANSWER_S)
    peer.hello(hello(f"client {number}", rows=SPEC, wants_arena=False))
    ready: m.Ready = peer.expect(m.Ready)
    return peer, root_hash(Fingerprint(ready.fingerprint))


if __name__ == "__main__":
    main()
