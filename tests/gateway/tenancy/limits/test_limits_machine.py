"""Any order of reservations, growths, settlings and times: never over a limit, never too strict."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError
from outrider.gateway.tenancy.keys.amounts import Amounts, LimitSpec, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.limiter import Reservation
from tests.gateway.tenancy.limits.model import Held, Model, amount_of, limits_of
from tests.gateway.tenancy.limits.rigs import Rig, key

TEAM = LimitSpec(
    tokens_per_minute=120,
    requests_per_day=9,
    concurrent_requests=4,
    usd_per_day=3e-7,
    usd_per_week=6e-7,
    end_user=LimitSpec(usd_per_week=4e-7, usd_per_30_days=5e-7, concurrent_requests=2),
)
PRINCIPALS = (
    key(
        LimitSpec(
            requests_per_minute=4,
            tokens_per_minute=80,
            usd_per_month=5e-7,
            end_user=LimitSpec(tokens_per_minute=70, requests_per_day=3, usd_per_7_days=3e-7),
            models={"large": LimitSpec(tokens_per_minute=50, concurrent_requests=2)},
        ),
        key_id="k1",
        team_id="t",
        team_limits=TEAM,
    ),
    key(
        LimitSpec(tokens_per_day=200, usd_per_7_days=5e-7),
        key_id="k2",
        team_id="t",
        team_limits=TEAM,
    ),
    key(LimitSpec(tokens_per_minute=60, concurrent_requests=2, requests_per_day=6), key_id="k3"),
)
END_USERS = (None, "", "ann", "bob")
LIMITS = dict(
    pair
    for principal in PRINCIPALS
    for end_user in END_USERS
    for pair in limits_of(principal, end_user)
)

times = st.one_of(
    st.sampled_from([0.0, 0.25, 0.75, 1.0, 59.0, 60.0, 60.75, 61.0, 3_600.0, 43_199.75, 86_400.0]),
    st.floats(0, 70).map(lambda seconds: round(seconds, 2)),
    st.just(20 * 86_400.0),
)
tokens = st.integers(0, 60)
nanos = st.integers(0, 200)
tier_sets = st.sampled_from([("small",), ("large",), ("small", "large"), ("",)])


class Machine(RuleBasedStateMachine):
    """A limiter beside the model of it."""

    make_rig: Callable[[], Rig]

    def __init__(self) -> None:
        super().__init__()
        self.rig = self.make_rig().__enter__()
        self.model = Model()
        self.open: list[tuple[Reservation, Held]] = []
        self.ended: list[Reservation] = []

    def teardown(self) -> None:
        self.rig.__exit__(None, None, None)

    def ask(self, principal: Principal, want: Want) -> Reservation | Exception:
        try:
            return self.rig.run(self.rig.limiter.reserve(principal, want))
        except (RateLimitError, BudgetError) as refused:
            return refused

    @rule(principal=st.sampled_from(PRINCIPALS), tiers=tier_sets, tokens=tokens, nanos=nanos)
    def reserve(
        self, principal: Principal, tiers: tuple[str, ...], tokens: int, nanos: int
    ) -> None:
        by_tier = {
            t: Amounts(tokens=tokens // (i + 1), usd_nanos=nanos) for i, t in enumerate(tiers)
        }
        want = Want(by_tier=by_tier)
        held = self.model.reserve(principal, want, self.rig.now_s)
        given = self.ask(principal, want)
        if held is None:
            assert isinstance(given, Exception), "there was no room"
            return
        assert not isinstance(given, Exception), f"there was room: {given}"
        self.open.append((given, held))
        self.check_states(given, held)

    def check_states(self, given: Reservation, held: Held) -> None:
        """Compare what headers tell with the model, where a name has one owner."""
        for state in given.states:
            names = [
                name
                for name, limit in limits_of(held.principal, held.end_user)
                if (name[0], *name[2:], limit)
                == (state.scope, state.model, state.name, state.limit)
            ]
            left = [max(0, state.limit - self.model.used(name, self.rig.now_s)) for name in names]
            assert state.remaining in left, names

    @rule(data=st.data(), end_user=st.sampled_from(END_USERS[1:]))
    def count_for(self, data: st.DataObject, end_user: str) -> None:
        waiting = [(given, held) for given, held in self.open if held.end_user is None]
        if not waiting:
            return
        given, held = data.draw(st.sampled_from(waiting))
        if not list(limits_of(held.principal, end_user))[len(list(limits_of(held.principal))) :]:
            return
        if self.model.count_for(held, end_user, self.rig.now_s):
            self.rig.run(given.count_for(end_user))
        else:
            with pytest.raises((RateLimitError, BudgetError), match="end user's limit"):
                self.rig.run(given.count_for(end_user))

    @rule(data=st.data(), tokens=tokens, nanos=nanos)
    def grow(self, data: st.DataObject, tokens: int, nanos: int) -> None:
        if not self.open:
            return
        given, held = data.draw(st.sampled_from(self.open))
        tier = data.draw(st.sampled_from(sorted(held.by_tier)))
        more = Want(by_tier={tier: Amounts(requests=0, tokens=tokens, usd_nanos=nanos)})
        expected = self.model.grow(held, more, self.rig.now_s)
        assert self.rig.run(given.grow(more)) == expected
        assert dict(given.reserved.by_tier) == held.by_tier

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if not self.open:
            return
        given, held = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        used = {}
        left = held.overall
        for tier, amounts in held.by_tier.items():
            if data.draw(st.booleans()):
                used[tier] = Amounts(
                    tokens=data.draw(st.integers(0, min(amounts.tokens, left.tokens))),
                    usd_nanos=data.draw(st.integers(0, min(amounts.usd_nanos, left.usd_nanos))),
                )
                left = Amounts(
                    tokens=left.tokens - used[tier].tokens,
                    usd_nanos=left.usd_nanos - used[tier].usd_nanos,
                )
        self.model.settle(held, used)
        self.rig.run(given.settle(used))
        self.ended.append(given)

    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        if self.ended:
            given = data.draw(st.sampled_from(self.ended))
            self.rig.run(given.settle({}))
            more = Want(by_tier={"large": Amounts(requests=0, tokens=1)})
            assert not self.rig.run(given.grow(more))

    @rule(seconds=times)
    def wait(self, seconds: float) -> None:
        self.rig.turn(seconds)

    @rule()
    def wait_as_long_as_told(self) -> None:
        """Check that a retry after the told time finds room, if no other request came."""
        principal = PRINCIPALS[2]
        want = Want(by_tier={"small": Amounts(tokens=20)})
        given = self.ask(principal, want)
        if isinstance(given, RateLimitError) and given.limit != "concurrent_requests":
            assert given.retry_after_s > 0
            self.rig.turn(given.retry_after_s + 0.001)
            given = self.ask(principal, want)
        if isinstance(given, Exception):
            # It may have been behind the longer wait; when it ends nobody can say.
            assert isinstance(given, RateLimitError)
            assert given.limit == "concurrent_requests"
            return
        held = self.model.reserve(principal, want, self.rig.now_s)
        assert held is not None
        self.open.append((given, held))

    @invariant()
    def no_limit_is_passed(self) -> None:
        for name, limit in LIMITS.items():
            assert self.model.used(name, self.rig.now_s) <= limit
            if name[3].endswith("minute"):
                assert self.model.most_in_60_s(name) <= limit, name


def _run(make_rig: Callable[[], Rig], max_examples: int, num_steps: int) -> None:
    machine = type("Bound", (Machine,), {"make_rig": staticmethod(make_rig)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_no_order_of_things_passes_a_limit(make_rig: Callable[[], Rig]) -> None:
    _run(make_rig, 25, 40)


@pytest.mark.long
def test_no_order_of_things_passes_a_limit_at_length(make_rig: Callable[[], Rig]) -> None:
    _run(make_rig, 1_000, 80)


def test_the_model_itself_counts() -> None:
    """A model that lets everything pass would prove nothing."""
    model = Model()
    want = Want(by_tier={"small": Amounts(tokens=60)})
    held = model.reserve(PRINCIPALS[2], want, 0.5)
    assert held is not None
    assert model.reserve(PRINCIPALS[2], want, 60.9) is None
    assert model.reserve(PRINCIPALS[2], want, 61.0) is not None
    model.settle(held, {"small": Amounts(tokens=10)})
    name = next(n for n in LIMITS if n[1] == "k3" and n[3] == "tokens_per_minute")
    assert model.most_in_60_s(name) == 60
    assert amount_of(name, want.most) == 60
