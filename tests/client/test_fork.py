"""A forked child owns nothing of its parent's connection, and disturbs nothing by ending it."""

import subprocess
import sys

from tests.process.engine import CHAIN_CHUNKS
from tests.process.peer import settle
from tests.servers import Server, kvkeep_env

SCRIPT = """
import ctypes, os, resource, signal, sys
from kvkeep.client import State
from kvkeep.errors import MemoryRefused
from kvkeep.types import CommitOutcome
from kvkeep.wire import messages as m
from tests.process.engine import Engine

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
engine = Engine(sys.argv[1], "parent").wait_ready()
client, mapping = engine.client, engine.client.mapping
held = engine.stage(101)
address = mapping.address + held.offsets[0]


def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def drops_itself():
    assert client.state is State.CLOSED and "fork" in client.why, client.why
    assert client.call(m.Ping) is None and client.mapping is None
    client.notify(m.Bye())
    client.pump()
    client.close()
    try:
        with mapping.use():
            raise SystemExit("the mapping may be used")
    except MemoryRefused:
        pass


def connects_anew():
    with Engine(sys.argv[1], "child").wait_ready() as own:
        own.store(102)
        assert own.load(102)[0] > 0


assert in_child(drops_itself) == 0
assert in_child(lambda: ctypes.memset(address, 1, 1)) == -signal.SIGSEGV
assert in_child(lambda: mapping.generation(0)) == -signal.SIGSEGV
assert in_child(connects_anew) == 0
assert client.up, client.why
engine.fill(held)
assert set(engine.commit(held)) == {CommitOutcome.COMMITTED}
right, lost = engine.load(101)
print(right, lost, len(held.keys), flush=True)
client.close()
"""


def test_a_forked_child_drops_the_connection(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.socket],
        capture_output=True,
        text=True,
        env=kvkeep_env(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    right, lost, staged = map(int, done.stdout.split())
    assert (lost, right) == (0, CHAIN_CHUNKS)
    assert staged > 0
    settle(server)
