"""The circuit breaker: when it opens, how it closes, and a state machine that tries to fool it."""

import random
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.gateway.contract.errors.tree import BLAMELESS_FAILURES, FailureKind, UpstreamError
from outrider.gateway.upstream.breaker import Breaker
from tests.gateway.waiting import HandClock

FAILURES: tuple[FailureKind, ...] = get_args(FailureKind)
BLAMED = [failure for failure in FAILURES if failure not in BLAMELESS_FAILURES]
MAX_OPEN_S = 30.0 * 1.2
MAX_HOLD_S = 60.0


def _breaker(clock: HandClock, seed: int = 0) -> Breaker:
    return Breaker(clock=clock, rng=random.Random(seed), name="127.0.0.1:1")


def _opened(clock: HandClock) -> Breaker:
    breaker = _breaker(clock)
    for _ in range(5):
        breaker.failed(breaker.began(), "reset")
    assert breaker.state == "open"
    return breaker


def _half_opened(clock: HandClock) -> Breaker:
    breaker = _opened(clock)
    clock.now_s = breaker.open_until_s
    breaker.probe_succeeded()
    assert breaker.state == "half_open"
    return breaker


@pytest.mark.parametrize("failure", BLAMED)
def test_five_failures_in_a_row_open_it(failure: FailureKind) -> None:
    breaker = _breaker(HandClock())
    for _ in range(4):
        breaker.failed(breaker.began(), failure)
    assert breaker.state == "closed"
    assert breaker.admits()
    breaker.failed(breaker.began(), failure)
    assert breaker.state == "open"
    assert not breaker.admits()


def test_a_success_interrupts_the_row() -> None:
    breaker = _breaker(HandClock())
    breaker.succeeded(breaker.began())
    breaker.succeeded(breaker.began())
    for _ in range(4):
        breaker.failed(breaker.began(), "reset")
    breaker.succeeded(breaker.began())
    breaker.failed(breaker.began(), "reset")  # five of eight
    assert breaker.state == "closed"


def test_half_of_at_least_ten_open_it() -> None:
    breaker = _breaker(HandClock())
    for _ in range(4):
        breaker.failed(breaker.began(), "status")
        breaker.succeeded(breaker.began())
    breaker.failed(breaker.began(), "status")
    assert breaker.state == "closed", "five of nine"
    breaker.succeeded(breaker.began())
    assert breaker.state == "closed", "a success opens nothing"
    breaker.failed(breaker.began(), "status")
    assert breaker.state == "open"


def test_only_the_last_twenty_outcomes_count() -> None:
    breaker = _breaker(HandClock())
    for _ in range(100):
        breaker.succeeded(breaker.began())
    for _ in range(9):  # 3, 6 and 9 of the last 20 at most, never five in a row
        breaker.failed(breaker.began(), "status")
        breaker.succeeded(breaker.began())
    assert breaker.state == "closed"
    breaker.failed(breaker.began(), "status")
    assert breaker.state == "open", "ten of twenty"


def test_a_busy_server_is_held_back_but_not_broken() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    for _ in range(20):
        breaker.failed(breaker.began(), "throttled", 7.0)
    assert breaker.state == "closed"
    assert not breaker.admits()
    assert breaker.wait_s == pytest.approx(7.0)
    clock.now_s += 6.9
    assert not breaker.admits()
    clock.now_s += 0.2
    assert breaker.admits()
    assert breaker.wait_s == 0


@pytest.mark.parametrize(
    ("asked_s", "held_s"),
    [(None, 1.0), (0.0, 0.0), (5.0, 5.0), (86400.0, 60.0), (-3.0, 1.0), (float("nan"), 1.0)],
)
def test_how_long_it_is_held_back(asked_s: float | None, held_s: float) -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    breaker.failed(breaker.began(), "throttled", asked_s)
    assert breaker.held_until_s - clock() == pytest.approx(held_s) or held_s == 0
    assert breaker.admits() == (held_s == 0)


def test_a_shorter_wait_does_not_shorten_a_longer_one() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    breaker.failed(breaker.began(), "throttled", 20.0)
    breaker.failed(breaker.began(), "throttled", 2.0)
    assert breaker.wait_s == pytest.approx(20.0)


def test_a_wait_beside_a_failure_is_kept_too() -> None:
    breaker = _breaker(HandClock())
    breaker.failed(breaker.began(), "status", 3.0)  # 503 with retry-after
    assert breaker.state == "closed"
    assert breaker.wait_s == pytest.approx(3.0)


def test_open_times_double_up_to_thirty_seconds_with_jitter() -> None:
    clock = HandClock()
    breaker = _opened(clock)
    factors = []
    for nominal_s in (1, 2, 4, 8, 16, 30, 30, 30):
        factors.append((breaker.open_until_s - clock()) / nominal_s)
        assert breaker.wait_s == pytest.approx(breaker.open_until_s - clock())
        clock.now_s = breaker.open_until_s - 0.01
        assert not breaker.wants_probe
        clock.now_s = breaker.open_until_s
        assert breaker.wants_probe
        assert not breaker.admits(), "time alone lets nothing through"
        breaker.probe_failed()
    assert all(0.8 <= factor <= 1.2 for factor in factors)
    assert max(factors) - min(factors) > 0.05


def test_one_answered_trial_closes_it() -> None:
    breaker = _half_opened(HandClock())
    assert breaker.admits()
    trial = breaker.began()
    assert not breaker.admits(), "one trial at a time"
    breaker.succeeded(trial)
    assert breaker.state == "closed"
    assert breaker.admits()


def test_the_first_token_of_a_trial_closes_it_and_a_later_failure_counts() -> None:
    breaker = _half_opened(HandClock())
    era = breaker.answered(breaker.began())
    assert breaker.state == "closed"
    for _ in range(4):
        breaker.failed(breaker.began(), "reset")
    breaker.failed(era, "reset")
    assert breaker.state == "open"


def test_a_failed_trial_opens_it_for_longer() -> None:
    clock = HandClock()
    breaker = _half_opened(clock)
    breaker.failed(breaker.began(), "first_token_timeout")
    assert breaker.state == "open"
    assert 1.6 <= breaker.open_until_s - clock() <= 2.4


@pytest.mark.parametrize("ending", ["cancelled", "throttled"])
def test_a_trial_that_says_nothing_makes_room_for_the_next(ending: str) -> None:
    clock = HandClock()
    breaker = _half_opened(clock)
    trial = breaker.began()
    if ending == "cancelled":
        breaker.cancelled(trial)
    else:
        breaker.failed(trial, "throttled", 2.0)
        assert not breaker.admits()
        clock.now_s += 2.0
    assert breaker.state == "half_open"
    assert breaker.admits()


def test_results_from_before_the_breaker_opened_do_not_count() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    eras = [breaker.began() for _ in range(8)]
    for era in eras[:5]:
        breaker.failed(era, "reset")
    until_s = breaker.open_until_s
    breaker.failed(eras[5], "reset")
    breaker.succeeded(eras[6])
    assert breaker.state == "open"
    assert breaker.open_until_s == until_s
    clock.now_s = until_s
    breaker.probe_succeeded()
    trial = breaker.began()
    breaker.cancelled(eras[7])
    assert not breaker.admits(), "the trial is still on its way"
    breaker.failed(trial, "reset")
    assert breaker.state == "open"


def test_a_late_failure_neither_ends_a_trial_nor_counts_once_it_is_closed() -> None:
    clock = HandClock()
    breaker = _breaker(clock)
    late = [breaker.began() for _ in range(6)]
    for _ in range(5):
        breaker.failed(breaker.began(), "reset")
    clock.now_s = breaker.open_until_s
    breaker.probe_succeeded()
    trial = breaker.began()
    breaker.failed(late.pop(), "reset")
    assert breaker.state == "half_open"
    breaker.succeeded(trial)
    for era in late:
        breaker.failed(era, "reset")
    assert breaker.state == "closed"


def test_probes_count_while_open_only() -> None:
    breaker = _breaker(HandClock())
    breaker.probe_failed()
    breaker.probe_succeeded()
    assert breaker.state == "closed"
    breaker = _half_opened(HandClock())
    breaker.probe_failed()
    assert breaker.state == "half_open"


@pytest.mark.parametrize(("calm_s", "nominal_s"), [(10.0, 4.0), (61.0, 1.0)])
def test_a_calm_minute_makes_the_next_open_time_short(calm_s: float, nominal_s: float) -> None:
    clock = HandClock()
    breaker = _opened(clock)
    breaker.probe_failed()
    breaker.probe_succeeded()
    breaker.succeeded(breaker.began())
    clock.now_s += calm_s
    for _ in range(5):
        breaker.failed(breaker.began(), "reset")
    assert 0.8 * nominal_s <= breaker.open_until_s - clock() <= 1.2 * nominal_s


def test_errors_and_breaker_blame_the_same_side() -> None:
    for failure in FAILURES:
        breaker = _breaker(HandClock())
        for _ in range(5):
            breaker.failed(breaker.began(), failure)
        error = UpstreamError("The cloud tier failed.", failure=failure)
        assert error.blames_server == (breaker.state == "open")


class BreakerMachine(RuleBasedStateMachine):
    """Requests that overlap, end late and out of order; probes at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.breaker = _breaker(self.clock, seed=1)
        self.eras: list[int] = []  # of the requests on their way, oldest first
        self.trials: list[int] = []  # those of them that began in half_open
        self.num_in_a_row = 0  # failures of the present closed state
        self.opened_s = self.clock()

    def _take(self, index: int) -> tuple[int, bool]:
        """Removes one request. True: it began in the state that the breaker has now."""
        era = self.eras.pop(index % len(self.eras))
        if era in self.trials:
            self.trials.remove(era)
        return era, era == self.breaker._era

    def _watch(self, before: str) -> None:
        after = self.breaker.state
        if after != before:
            self.num_in_a_row = 0
        if after == "open" and before != "open":
            self.opened_s = self.clock()

    @precondition(lambda self: self.breaker.admits())
    @rule()
    def begin(self) -> None:
        era = self.breaker.began()
        self.eras.append(era)
        if self.breaker.state == "half_open":
            self.trials.append(era)

    @precondition(lambda self: self.eras)
    @rule(index=st.integers(0, 50))
    def answer(self, index: int) -> None:
        before, place = self.breaker.state, index % len(self.eras)
        era = self.eras[place]
        self.eras[place] = self.breaker.answered(era)
        if era in self.trials and self.eras[place] != era:
            self.trials.remove(era)
            assert self.breaker.state == "closed"
        self._watch(before)

    @precondition(lambda self: self.eras)
    @rule(index=st.integers(0, 50))
    def succeed(self, index: int) -> None:
        before = self.breaker.state
        era, is_present = self._take(index)
        self.breaker.succeeded(era)
        if is_present:
            assert self.breaker.state == "closed"
            self.num_in_a_row = 0
        else:
            assert self.breaker.state == before
        self._watch(before)

    @precondition(lambda self: self.eras)
    @rule(index=st.integers(0, 50), failure=st.sampled_from(FAILURES))
    def fail(self, index: int, failure: FailureKind) -> None:
        before = self.breaker.state
        era, is_present = self._take(index)
        self.breaker.failed(era, failure)
        if failure == "throttled":
            assert not self.breaker.admits()
        if not is_present or failure in BLAMELESS_FAILURES:
            assert self.breaker.state == before
        elif before == "half_open":
            assert self.breaker.state == "open"
        else:
            self.num_in_a_row += 1
            assert self.num_in_a_row < 5 or self.breaker.state == "open"
        self._watch(before)

    @precondition(lambda self: self.eras)
    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        before = self.breaker.state
        self.breaker.cancelled(self._take(index)[0])
        assert self.breaker.state == before

    @precondition(lambda self: self.breaker.state == "closed" and self.breaker.admits())
    @rule()
    def break_down(self) -> None:
        """Five that fail at once, so that the rarer states are met often."""
        for era in [self.breaker.began() for _ in range(5)]:
            self.breaker.failed(era, "reset")
        assert self.breaker.state == "open"
        self._watch("closed")

    @rule(is_alive=st.booleans())
    def probe(self, is_alive: bool) -> None:
        before = self.breaker.state
        if not self.breaker.wants_probe:
            return
        assert before == "open"
        assert self.clock() - self.opened_s >= 0.8
        if is_alive:
            self.breaker.probe_succeeded()
            assert self.breaker.admits() == (self.breaker.held_until_s <= self.clock())
        else:
            self.breaker.probe_failed()
        assert self.breaker.state == ("half_open" if is_alive else "open")
        self._watch(before)

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 3.0, 61.0]))
    def wait(self, seconds: float) -> None:
        before = self.breaker.state
        self.clock.now_s += seconds
        assert self.breaker.state == before, "time alone changes no state"

    @invariant()
    def one_trial_and_none_while_open(self) -> None:
        present = [era for era in self.trials if era == self.breaker._era]
        if self.breaker.state == "half_open":
            assert len(present) <= 1
            assert not (present and self.breaker.admits())
        if self.breaker.state == "open":
            assert not self.breaker.admits()
            assert self.breaker.open_until_s - self.clock() <= MAX_OPEN_S

    @invariant()
    def nothing_is_shut_for_ever(self) -> None:
        """With nothing on its way, time and a good probe always open the door again."""
        assert self.breaker.wait_s <= max(MAX_OPEN_S, MAX_HOLD_S)
        if self.breaker.state != "open" and not self.trials:
            assert self.breaker.admits(self.clock() + MAX_HOLD_S)


TestBreakerMachine = BreakerMachine.TestCase
