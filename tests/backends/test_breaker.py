"""The breaker against a plain model of it, over random orders of calls, failures and probes."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.backends.breaker import Breaker, State, Turn

FAILURES, FIRST_S, MOST_S = 3, 5.0, 60.0


class BreakerMachine(RuleBasedStateMachine):
    """The model keeps a row of results since the last change, and how often probes failed."""

    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(failures=FAILURES, open_s=FIRST_S, open_most_s=MOST_S)
        self.now_s = 100.0
        self.state = State.CLOSED
        self.current: list[Turn] = []  # turns handed out since the last change of state
        self.row = 0
        self.failed_probes = 0
        self.opened_s = 0.0

    def delay_s(self) -> float:
        return min(MOST_S, FIRST_S * (1 << self.failed_probes))

    def change(self, state: State) -> None:
        self.state = state
        self.current = []
        self.opened_s = self.now_s

    @rule(by_s=st.sampled_from([0.0, 0.5, 4.9, 5.0, 31.0, 60.0]))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s

    @precondition(lambda self: self.state is State.CLOSED)
    @rule(target=turns)
    def a_call_begins(self) -> Turn:
        turn = self.breaker.enter()
        self.current.append(turn)
        return turn

    @rule(turn=turns)
    def a_call_fails(self, turn: Turn) -> None:
        opened = self.breaker.failed(turn, self.now_s)
        counts = turn in self.current
        self.row += counts
        assert opened == (counts and self.row >= FAILURES)
        if opened:
            self.failed_probes = 0
            self.change(State.OPEN)

    @rule(turn=turns)
    def a_call_is_answered(self, turn: Turn) -> None:
        self.breaker.succeeded(turn)
        if turn in self.current:
            self.row = 0

    @rule(early=st.booleans())
    def a_probe_may_begin(self, early: bool) -> None:
        due = early or self.now_s >= self.opened_s + self.delay_s()
        began = self.breaker.begin_probe(self.now_s, early=early)
        assert began == (self.state is State.OPEN and due)
        if began:
            self.change(State.HALF_OPEN)

    @precondition(lambda self: self.state is State.HALF_OPEN)
    @rule(worked=st.booleans())
    def the_probe_ends(self, worked: bool) -> None:
        self.breaker.end_probe(self.now_s, worked=worked)
        self.failed_probes = 0 if worked else self.failed_probes + 1
        self.row = 0 if worked else self.row + 1
        self.change(State.CLOSED if worked else State.OPEN)

    @invariant()
    def they_agree(self) -> None:
        assert self.breaker.state is self.state
        assert self.breaker.closed == (self.state is State.CLOSED)
        assert self.breaker.failures_in_row == self.row
        left_s = 0.0
        if self.state is State.OPEN:
            left_s = max(0.0, self.opened_s + self.delay_s() - self.now_s)
        assert self.breaker.retry_in_s(self.now_s) == left_s


TestBreaker = BreakerMachine.TestCase
