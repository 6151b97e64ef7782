"""The lookup half of the scheduler side: pending, late, revoked and forgotten answers."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.types import EndOutcome
from kvkeep.wire import messages as m

pytestmark = pytest.mark.engine

EPOCH = 5
CHUNK = 64


class FakeClient:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.ready = m.Ready(b"f" * 32, 1, ())
        self.welcome = SimpleNamespace(lookup_wait_ms=500.0, backends=("disk", "far"))
        self.epoch, self.up = EPOCH, True
        self.calls: list[Any] = []
        self.sent: list[Any] = []
        self.abandoned: list[Any] = []
        self.waits_s: list[float] = []

    def call(self, make: Any) -> Any:
        from kvkeep.client import Call

        if not self.up:
            return None
        self.calls.append(Call(make(len(self.calls) + 1), time.monotonic(), EPOCH))
        return self.calls[-1]

    def wait(self, call: Any, most_s: float) -> bool:
        self.waits_s.append(most_s)
        return bool(call.done)

    def pump(self) -> None:
        pass

    def notify(self, message: Any) -> None:
        self.sent.append(message)

    def abandon(self, call: Any) -> None:
        call.abandoned = call.lost = True
        self.abandoned.append(call)

    @property
    def last(self) -> Any:
        return self.calls[-1]

    def answer(self, chunks: int, *, lease: int = 9, tiers: bytes = b"") -> None:
        self.last.reply = m.Found(self.last.message.seq, lease, chunks, (), b"", tiers)


class Parts:
    def __init__(self, **wishes: Any) -> None:
        from kvkeep.connectors.vllm.lookups import Lookups, Revocations
        from kvkeep.connectors.vllm.params import parse
        from kvkeep.connectors.vllm.tracked import Tracked

        settings: Any = SimpleNamespace(chunk_tokens=CHUNK, reads=True)
        self.client = FakeClient()
        client: Any = self.client
        self.revocations = Revocations()
        self.lookups = Lookups(settings, client, 1, self.revocations)
        request: Any = SimpleNamespace(
            request_id="r",
            cache_salt=None,
            num_tokens=10 * CHUNK,
            num_prompt_tokens=10 * CHUNK,
            all_token_ids=list(range(10 * CHUNK)),
        )
        self.tracked = Tracked(request, parse({"kvkeep": wishes} if wishes else None))

    def matched(self, local_tokens: int = 0) -> Any:
        return self.lookups.matched(self.tracked, local_tokens)


def test_a_pending_answer_is_not_waited_for_while_others_run() -> None:
    parts = Parts()
    parts.lookups.begin(parts.tracked)
    assert (parts.client.last.message.near, parts.client.last.message.fetch) == (False, True)
    parts.client.last.ticket = 3
    parts.lookups.begin_step(100)
    assert parts.matched() == (None, False)
    assert parts.client.waits_s == []
    parts.lookups.begin_step(0)
    assert parts.matched() == (None, False)
    assert parts.matched() == (None, False)
    assert parts.client.waits_s == [0.001]  # once per step, however many wait
    parts.client.answer(4, tiers=bytes([0, 0, 1, 2]))
    assert parts.matched(local_tokens=CHUNK) == (3 * CHUNK, True)
    found = parts.tracked.found
    assert found is not None
    assert parts.lookups.tiers(found) == ["l1", "l1", "l2:disk", "l2:far"]
    assert len(parts.client.calls) == 1


def test_an_answer_far_past_its_limit_is_given_up_for_what_is_in_l1() -> None:
    parts = Parts(prefetch_deadline_ms=300)
    parts.lookups.begin(parts.tracked)
    call = parts.client.last
    assert 299 < call.message.wait_ms <= 300
    call.ticket = 3
    call.sent_s -= 1.2
    assert parts.matched() == (None, False)
    call.sent_s -= 0.2
    assert parts.matched() == (None, False)
    assert parts.client.abandoned == [call]
    again = parts.client.last.message
    assert (again.near, again.fetch, again.wait_ms) == (True, False, 0)
    parts.client.answer(2)
    assert parts.matched() == (2 * CHUNK, True)


def test_a_server_that_goes_away_while_it_is_asked_is_a_miss() -> None:
    parts = Parts()
    parts.lookups.begin(parts.tracked)
    parts.client.last.ticket = 3
    parts.client.up = False
    assert parts.matched() == (0, False)


def test_wishes_are_sent() -> None:
    parts = Parts(prefetch_deadline_ms=0)
    parts.lookups.begin(parts.tracked)
    assert (parts.client.last.message.fetch, parts.client.last.message.wait_ms) == (False, 0)
    parts = Parts(no_lookup=True)
    parts.lookups.begin(parts.tracked)
    assert parts.matched() == (0, False)
    assert parts.client.calls == []
    parts = Parts()
    parts.lookups.begin(parts.tracked)
    assert parts.client.last.message.wait_ms == -1


def test_a_deadline_counts_from_the_arrival() -> None:
    parts = Parts(prefetch_deadline_ms=300)
    parts.lookups.begin(parts.tracked)
    parts.client.answer(4, lease=0)  # there, but not reserved: the request was far
    parts.tracked.arrived_s -= 0.2
    assert parts.matched() == (None, False)
    assert parts.client.last.message.near
    assert parts.client.last.message.wait_ms < 101
    parts.client.last.ticket = 4  # pending again
    assert parts.matched() == (None, False)
    parts.client.answer(4)
    assert parts.matched() == (4 * CHUNK, True)


def test_what_is_taken_back_before_it_is_used_is_asked_for_again() -> None:
    from kvkeep.connectors.vllm.lookups import MOST_REVOKED

    parts = Parts()
    parts.lookups.begin(parts.tracked)
    for lease in range(1, MOST_REVOKED + 1):
        parts.client.answer(4, lease=lease)
        assert parts.matched() == (4 * CHUNK, True)
        parts.revocations.on_push(m.Revoked(lease))
        assert parts.matched() == (None, False)
        assert parts.client.last.message.near
    parts.client.answer(4, lease=77)
    parts.revocations.on_push(m.Revoked(77))  # even before the answer was read
    assert parts.matched() == (0, False)
    assert parts.matched() == (0, False)
    assert len(parts.client.calls) == 1 + MOST_REVOKED
    assert parts.client.sent == []  # the server ended them itself


def test_forget_gives_back_and_asks_anew() -> None:
    parts = Parts()
    parts.lookups.begin(parts.tracked)
    parts.client.answer(4)
    assert parts.matched() == (4 * CHUNK, True)
    parts.lookups.forget(parts.tracked)
    assert parts.client.sent == [m.End(9, (0,), EndOutcome.UNUSED, request="r")]
    assert parts.matched() == (None, False)
    assert len(parts.client.calls) == 2
    parts.lookups.forget(parts.tracked)
    assert parts.client.abandoned == [parts.client.last]


def test_revocations_are_bounded() -> None:
    parts = Parts()
    for lease in range(3000):
        parts.revocations.on_push(m.Revoked(lease + 1))
    assert len(parts.revocations._leases) <= 1025
    assert parts.revocations.take(3000)
    assert not parts.revocations.take(3000)
