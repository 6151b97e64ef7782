"""Asks a running server as an operator: one connection, one question, one answer.

Takes no arena and joins no session, so that looking changes nothing.
"""

from typing import Any

import msgspec

from kvkeep import __version__
from kvkeep.client import Client
from kvkeep.errors import KVKeepError
from kvkeep.types import Role
from kvkeep.wire import messages as m

TIMEOUT_S = 10.0


class NotAnswered(KVKeepError):
    """The server could not answer this question; the text is its sentence."""


def ask(path: str, what: str, argument: str = "", *, timeout_s: float = TIMEOUT_S) -> Any:  # noqa: ANN401 - JSON
    """The server's answer, decoded. Raises KVKeepError when there is none."""
    hello = m.Hello(
        m.VERSIONS,
        session="",
        role=Role.OPERATOR,
        writes=False,
        wants_arena=False,
        client=f"kvkeep {__version__} command line",
    )
    client = Client(path, hello)
    client.connect()
    try:
        reply = client.ask(lambda seq: m.Query(seq, what, argument), timeout_s)
    finally:
        client.close()
    if isinstance(reply, m.Failed):
        raise NotAnswered(reply.text)
    assert isinstance(reply, m.Answer)
    return msgspec.json.decode(reply.body)
