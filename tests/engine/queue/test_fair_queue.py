"""Fair queueing: shares, weights, priorities, pre-emption; and that no answer depends on it."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.config import EngineConfig
from outrider.engine.errors import QueueFullError
from outrider.engine.events import Finished
from outrider.engine.queue.fair_queue import FairQueue, FairQueueConfig
from outrider.engine.queue.policy import ArrivalOrder
from outrider.engine.request import HIGH, LOW, NO_OBJECTIVE, NORMAL, EngineRequest, LatencyObjective
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.verifier.params import SamplingParams, Tier
from tests.engine.queue.simulation import BLOCK_SIZE, CAPACITY, Simulation, new_sequence
from tests.engines import (
    assert_idle,
    make_engine,
    make_request,
    random_prompt,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import plainly


class TenantSimulation(Simulation):
    """A simulated engine whose requests have tenants."""

    def __init__(self, *, large: int = 400, small: int = 400, **config: Any) -> None:
        self.queue = FairQueue(FairQueueConfig(aging_s=10.0, max_lead_tokens=200.0))
        super().__init__(
            num_blocks={"large": large, "small": small},
            config=EngineConfig(**{"min_prefill_tokens": 1, **config}),
            policy=self.queue,
        )
        self.num_asked = 0
        self.everybody: list[Sequence] = []

    def ask(  # noqa: PLR0913 - as many as requests have that matter here
        self,
        tenant: str,
        *,
        num_prompt: int = 20,
        max_tokens: int = 10,
        weight: float = 1.0,
        priority: int = NORMAL,
        objective: LatencyObjective = NO_OBJECTIVE,
        tier: Tier = "large",
        submitted_s: float = 0.0,
    ) -> Sequence:
        self.num_asked += 1
        request = EngineRequest(
            request_id=f"{tenant}{self.num_asked}",
            prompt_token_ids=tuple([self.num_asked] * num_prompt),
            tier=tier,
            sampling=SamplingParams(max_tokens=max_tokens),
            tenant=tenant,
            weight=weight,
            priority=priority,
            objective=objective,
        )
        sequence = new_sequence(request, self.caches[tier], submitted_s=submitted_s)
        self.live[request.request_id] = sequence
        self.everybody.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def all_of(self, tenant: str) -> list[Sequence]:
        return [sequence for sequence in self.everybody if sequence.request.tenant == tenant]

    def step(self) -> None:
        self.scheduler.preempt_for_waiting(0.0)
        super().step()

    def tenants(self, now_s: float = 0.0) -> str:
        """The order in which tenants would start, a letter each."""
        order = self.queue.order(list(self.scheduler.waiting), now_s)
        return "".join(sequence.request.tenant for sequence in order)

    def starts(self) -> str:
        """The order in which tenants have started, a letter each."""
        return "".join(request_id[0] for request_id in self.started)


# ---- turns -----------------------------------------------------------------------------------


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    simulation = TenantSimulation()
    asked = [simulation.ask("a", num_prompt=n) for n in (30, 3, 20, 5)]
    assert list(simulation.queue.order(list(reversed(asked)), 0.0)) == asked


def test_tenants_take_turns_whoever_came_first() -> None:
    simulation = TenantSimulation()
    for tenant in "aaaaaabb":
        simulation.ask(tenant)
    assert simulation.tenants() == "ababaaaa"


def test_turns_are_counted_in_tokens() -> None:
    simulation = TenantSimulation()
    for _ in range(2):
        simulation.ask("a", num_prompt=100, max_tokens=10)
    for _ in range(8):
        simulation.ask("b", num_prompt=12, max_tokens=10)
    assert simulation.tenants() == "abbbbbabbb"


def test_a_weight_is_a_multiple_of_the_share() -> None:
    simulation = TenantSimulation()
    for _ in range(4):
        simulation.ask("a")
    for _ in range(12):
        simulation.ask("b", weight=3.0)
    assert Counter(simulation.tenants()[:8]) == {"a": 2, "b": 6}


def test_an_idle_tenant_accumulates_no_credit() -> None:
    simulation = TenantSimulation(max_sequences=1)
    simulation.ask("b")
    simulation.run()
    for _ in range(20):
        simulation.ask("a")
    for _ in range(60):
        simulation.step()
    num_before = len(simulation.started)
    for _ in range(4):
        simulation.ask("b")
    simulation.run()
    assert simulation.starts()[num_before:][:8] in ("abababab", "babababa")


def test_a_long_running_answer_saves_no_claim_either() -> None:
    """Nothing of b waits while a is served, so b is not owed anything afterwards."""
    simulation = TenantSimulation(max_sequences=2)
    simulation.ask("b", max_tokens=100)
    for _ in range(20):
        simulation.ask("a", max_tokens=2)
        while len(simulation.live) > 1:
            simulation.step()
    assert "b1" in simulation.live
    for tenant in "aaaabbbb":
        simulation.ask(tenant)
    assert simulation.tenants() in ("abababab", "babababa")


def test_an_answer_that_ended_early_is_not_paid_for() -> None:
    simulation = TenantSimulation(max_sequences=1)
    simulation.ask("a", max_tokens=100)
    simulation.step()
    for tenant in "bbba":
        simulation.ask(tenant, num_prompt=40, max_tokens=1)
    assert simulation.tenants() == "bbba"
    simulation.abort("a1")  # it has had its prompt computed, and a token
    assert simulation.tenants() == "babb"


def test_answers_are_expected_to_be_as_long_as_the_ones_before() -> None:
    simulation = TenantSimulation()
    for _ in range(60):
        simulation.ask("a", num_prompt=1, max_tokens=3)
        simulation.run()
        simulation.ask("b", num_prompt=1, max_tokens=20)
        simulation.run()
    simulation.started.clear()
    # b's limit is lower now, but everybody has had about the same answer so far
    for _ in range(3):
        simulation.ask("a", num_prompt=10, max_tokens=1000)
        simulation.ask("b", num_prompt=10, max_tokens=15)
    assert simulation.tenants() == "ababab"


def test_tiers_are_queues_of_their_own() -> None:
    simulation = TenantSimulation()
    simulation.ask("a", num_prompt=300, tier="small")
    simulation.step()
    simulation.ask("a")
    simulation.ask("b")
    assert simulation.tenants() == "ab"


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_no_tenant_with_work_falls_behind_by_more_than_two_requests(seed: int) -> None:
    """The bound of start-time fair queueing, over any stretch in which all have work waiting."""
    rng = random.Random(seed)
    simulation = TenantSimulation(large=4000, max_sequences=1, max_tokens_per_step=10_000)
    weights = {name: rng.choice([0.5, 1.0, 2.0]) for name in "abc"[: rng.randrange(2, 4)]}
    costs = []
    for tenant, weight in weights.items():
        for _ in range(20):
            num_prompt, max_tokens = rng.randrange(1, 60), rng.randrange(1, 30)
            simulation.ask(tenant, num_prompt=num_prompt, max_tokens=max_tokens, weight=weight)
            costs.append((num_prompt + max_tokens) / weight)
    served = dict.fromkeys(weights, 0.0)
    lengths = {name: len(s.token_ids) + s.request.sampling.max_tokens
               for name, s in simulation.live.items()}  # fmt: skip
    while all(
        any(s.request.tenant == name for s in simulation.scheduler.waiting) for name in weights
    ):
        num_finished = len(simulation.finished)
        simulation.step()
        for name in simulation.finished[num_finished:]:
            served[name[0]] += lengths[name] / weights[name[0]]
        # one that runs is not counted yet, and one that has just begun is ahead
        assert max(served.values()) - min(served.values()) <= 2 * max(costs) + 1
    simulation.run()
    simulation.assert_empty()


# ---- priorities ------------------------------------------------------------------------------


def test_priorities_go_before_turns_and_arrival() -> None:
    simulation = TenantSimulation()
    simulation.ask("a", priority=LOW)
    simulation.ask("a")
    simulation.ask("b")
    simulation.ask("a", priority=HIGH)
    order = list(simulation.queue.order(list(simulation.scheduler.waiting), 0.0))
    assert [s.request.priority for s in order] == [HIGH, NORMAL, NORMAL, LOW]


def test_batch_work_comes_after_what_arrives_later() -> None:
    simulation = TenantSimulation()
    batch = simulation.ask("a", objective=LatencyObjective(is_batch=True))
    late = simulation.ask("a", submitted_s=5.0, objective=LatencyObjective(ttft_s=5.0))
    urgent = simulation.ask("a", submitted_s=5.0, objective=LatencyObjective(ttft_s=0.1))
    waiting = list(simulation.scheduler.waiting)
    assert list(simulation.queue.order(waiting, 5.0)) == [late, urgent, batch]
    assert list(simulation.queue.order(waiting, 12.0)) == [batch, late, urgent]


def test_waiting_long_enough_raises_the_priority() -> None:
    simulation = TenantSimulation()
    low = simulation.ask("a", priority=LOW)
    normal = simulation.ask("a", submitted_s=15.0)
    high = simulation.ask("a", submitted_s=15.0, priority=HIGH)
    waiting = [low, normal, high]
    assert list(simulation.queue.order(waiting, 9.0)) == [high, normal, low]
    assert list(simulation.queue.order(waiting, 16.0)) == [high, low, normal]
    assert list(simulation.queue.order(waiting, 21.0)) == [low, high, normal]


def test_priority_is_served_sooner_but_not_more() -> None:
    """A tenant whose requests all are urgent leads by a few of them, then takes turns."""
    simulation = TenantSimulation()
    for _ in range(20):
        simulation.ask("a", num_prompt=40, priority=HIGH)  # 50 tokens each, the lead is 200
    for _ in range(8):
        simulation.ask("b", num_prompt=40)
    order = simulation.tenants()
    assert order[:5] == "aaaaa"
    assert order.index("b") == 5
    assert order[5:15].count("b") >= 5


def test_low_priority_requests_start_despite_urgent_ones() -> None:
    simulation = TenantSimulation(max_sequences=1)
    simulation.ask("b", priority=LOW)
    for _ in range(30):
        simulation.ask("a", priority=HIGH)
    for step in range(400):
        now_s = step * 1.0
        simulation.scheduler.preempt_for_waiting(now_s)
        simulation.compute(simulation.scheduler.plan("large", now_s))
        if "b1" in simulation.finished:
            break
    assert 1 < len(simulation.finished) < 31, "it waited, but not to the end"


# ---- seats -----------------------------------------------------------------------------------


def test_a_tenant_without_a_place_gets_one_from_the_tenant_with_all() -> None:
    simulation = TenantSimulation(max_sequences=4)
    for _ in range(8):
        simulation.ask("a", max_tokens=30)
    simulation.step()
    simulation.step()
    running = simulation.scheduler.running["large"]
    assert [s.request.tenant for s in running] == list("aaaa")
    latest = max(running, key=lambda s: s.arrival_number)
    for _ in range(4):
        simulation.ask("b", max_tokens=30)
    simulation.step()
    assert Counter(s.request.tenant for s in running) == {"a": 3, "b": 1}
    assert latest.status is SequenceStatus.WAITING
    for _ in range(5):
        simulation.step()
    assert Counter(s.request.tenant for s in running) == {"a": 2, "b": 2}  # and no more
    simulation.run()
    assert max(s.num_preemptions for s in simulation.all_of("a")) == 1
    assert all(s.num_preemptions == 0 for s in simulation.all_of("b"))
    simulation.assert_empty()


def test_the_same_answer_gives_way_once_at_most() -> None:
    simulation = TenantSimulation(max_sequences=2)
    for _ in range(2):
        simulation.ask("a", max_tokens=90)
    simulation.step()
    for _ in range(5):
        newcomer = simulation.ask("b", max_tokens=2)
        for _ in range(12):
            simulation.step()
        displaced = [s.num_preemptions for s in simulation.all_of("a")]
    assert displaced == [1, 1]
    assert newcomer.status is SequenceStatus.WAITING  # the fifth waits for its turn
    simulation.run()
    simulation.assert_empty()


def test_answers_of_the_other_tier_are_preempted_as_well() -> None:
    simulation = TenantSimulation(max_sequences=3)
    for _ in range(6):
        simulation.ask("a", max_tokens=30)
    simulation.step()
    simulation.ask("b", tier="small", max_tokens=30)
    simulation.step()
    assert [s.request.tenant for s in simulation.scheduler.running["small"]] == ["b"]
    simulation.run()
    simulation.assert_empty()


def test_no_preemption_within_a_tenant_or_beyond_its_share() -> None:
    for tenants, num_seats in (("a", 3), ("abcd", 3), ("ab", 1)):
        simulation = TenantSimulation(max_sequences=num_seats)
        for _ in range(6):
            for tenant in tenants:
                simulation.ask(tenant, max_tokens=30)
        simulation.run()
        assert not any(s.num_preemptions for s in simulation.everybody)


def test_blocks_are_shared_like_seats() -> None:
    simulation = TenantSimulation(large=24, max_sequences=64)
    for _ in range(6):
        simulation.ask("a", num_prompt=12, max_tokens=8)
    simulation.step()
    num_before = len(simulation.scheduler.running["large"])
    newcomer = simulation.ask("b", num_prompt=28, max_tokens=4)
    simulation.step()
    assert newcomer.status is SequenceStatus.RUNNING
    assert len([s for s in simulation.scheduler.running["large"] if s is not newcomer]) < num_before
    simulation.run()
    simulation.assert_empty()


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(CAPACITY // BLOCK_SIZE, 20),
    max_sequences=st.sampled_from([1, 2, 5, 64]),
    max_tokens_per_step=st.sampled_from([3, 8, 64]),
)
@settings(max_examples=80)
def test_whatever_tenants_do_every_request_ends_and_nothing_is_left(
    seed: int, blocks: int, max_sequences: int, max_tokens_per_step: int
) -> None:
    rng = random.Random(seed)
    simulation = TenantSimulation(
        large=blocks,
        small=blocks,
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens_per_step,
    )
    weights = {"a": 1.0, "b": rng.choice([0.01, 1.0, 5.0]), "c": 2.0}
    expected: set[str] = set()
    for _ in range(rng.randrange(1, 24)):
        num_prompt = rng.randrange(1, CAPACITY - 2)
        tenant = rng.choice("aaabc")
        sequence = simulation.ask(
            tenant,
            num_prompt=num_prompt,
            max_tokens=rng.randrange(1, CAPACITY - num_prompt + 1),
            weight=weights[tenant],
            priority=rng.choice([LOW, NORMAL, NORMAL, HIGH]),
            tier=rng.choice(["large", "large", "small"]),
        )
        expected.add(sequence.request_id)
        for _ in range(rng.choice([0, 0, 1, 3])):
            simulation.step()
        if simulation.live and rng.random() < 0.2:
            victim = rng.choice(sorted(simulation.live))
            simulation.abort(victim)
            expected.discard(victim)
        if simulation.live and rng.random() < 0.2:
            moved = rng.choice(sorted(simulation.live))
            simulation.switch(moved, "small" if simulation.live[moved].tier == "large" else "large")
    simulation.run()
    assert expected <= set(simulation.finished)
    simulation.assert_empty()
    assert not simulation.queue._charges
    assert all(not books.accounts for books in simulation.queue._books.values())


# ---- the waiting room ------------------------------------------------------------------------


def test_a_full_room_has_a_place_for_another_tenant() -> None:
    engine = make_engine(tiny_pair(), config=EngineConfig(max_waiting=4))

    def ask(name: str, tenant: str) -> None:
        engine.submit(replace(make_request(name, random_prompt(4)), tenant=tenant))

    for number in range(4):
        ask(f"a{number}", "a")
    with pytest.raises(QueueFullError):
        ask("a4", "a")
    ask("b0", "b")
    ask("b1", "b")
    with pytest.raises(QueueFullError) as caught:
        ask("b2", "b")  # half of the room is its share
    assert caught.value.num_waiting == 6
    ask("c0", "c")
    ask("c1", "c")
    with pytest.raises(QueueFullError):  # twice the room is the most that there is
        ask("d0", "d")
    while engine.has_work:
        engine.step()
    assert_idle(engine)


# ---- the law ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_sequences", [6, 64])
def test_the_order_of_service_changes_no_answer(max_sequences: int) -> None:
    rng = random.Random(max_sequences)
    requests = [
        replace(
            request,
            tenant=rng.choice("abc"),
            priority=rng.choice([LOW, NORMAL, HIGH]),
        )
        for request in mixed_requests()
    ]
    engine = make_engine(
        tiny_pair(),
        block_size=4,
        large_blocks=60,
        config=EngineConfig(max_sequences=max_sequences),
    )
    arrivals = {request.request_id: rng.randrange(12) for request in requests}
    answers = serve(engine, requests, arrivals=arrivals)
    assert texts(answers) == plainly(tiny_pair(), mixed_requests())
    assert engine.stats().tiers["large"].num_preemptions > 0
    assert_idle(engine)


@pytest.mark.slow
def test_a_displaced_answer_goes_on_where_it_was() -> None:
    engine = make_engine(tiny_pair(), config=EngineConfig(max_sequences=2))
    requests = [
        replace(
            make_request(f"{tenant}{n}", random_prompt(20, seed=n), max_tokens=40, temperature=0.9),
            tenant=tenant,
        )
        for tenant, n in (("a", 0), ("a", 1), ("a", 2), ("b", 3))
    ]
    alone = plainly(tiny_pair(), requests)
    answers = serve(engine, requests, arrivals={"b3": 3})
    assert texts(answers) == alone
    assert isinstance(answers["a1"].finished, Finished)
    assert answers["a1"].stats.num_preemptions == 1
    assert len(answers["a1"].prefills) == 1


def test_arrival_order_is_still_there() -> None:
    simulation = TenantSimulation()
    asked = [
        simulation.ask(tenant, priority=priority) for tenant, priority in (("a", -1), ("b", 1))
    ]
    order = ArrivalOrder()
    assert list(order.order(list(reversed(asked)), 0.0)) == asked
    assert not order.may_displace
    assert order.displaced(asked[0], {asked[1]: 1}, wanted=1, capacity=1) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight", 0.0), ("weight", float("inf")), ("weight", float("nan")), ("priority", 2)],
)
def test_a_weight_or_priority_that_no_queue_could_use(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(make_request("a", (1,)), **{field: value})
