import threading

import pytest

from benchmarks.routing.bench_router import Cost, TimedPolicy, make_texts, measure_judging
from outrider.router.policy import FixedPolicy, RouteConstraints
from tests.benchmarks.scorers import make_scorer


def test_texts_have_the_lengths_and_differ() -> None:
    texts = make_texts(["What is 2 + 2?", "Say hello."], [5, 100, 3000], 4)
    assert {size: {len(text) for text in of_size} for size, of_size in texts.items()} == {
        5: {5},
        100: {100},
        3000: {3000},
    }
    assert len(set(texts[3000])) == 4
    assert texts == make_texts(["What is 2 + 2?", "Say hello."], [5, 100, 3000], 4)


def test_decisions_are_timed_in_the_thread_that_makes_them() -> None:
    timed = TimedPolicy(FixedPolicy("large"))
    assert timed.route("abc").tier == "large"
    thread = threading.Thread(target=timed.route, args=("abc", RouteConstraints()))
    thread.start()
    thread.join()
    assert len(timed.threads) == 2
    costs = timed.costs([3, 4])
    assert costs.keys() == {3}
    assert costs[3].num_decisions == 2
    assert 0 <= costs[3].p50_s <= costs[3].p99_s < 1


def test_both_goals_must_be_met() -> None:
    assert Cost(p50_s=0.001, p99_s=0.003, num_decisions=1).meets()
    assert not Cost(p50_s=0.0011, p99_s=0.003, num_decisions=1).meets()
    assert not Cost(p50_s=0.001, p99_s=0.0031, num_decisions=1).meets()
    assert Cost.of([1.0, 2.0, 3.0]).p50_s == 2.0
    with pytest.raises(ValueError, match="no samples"):
        Cost.of([])


def test_watches_are_timed_where_the_router_has_the_stages() -> None:
    costs = measure_judging(make_scorer(8), ["One?", "Two?"], rounds=3)
    assert costs is not None
    assert {name: cost.num_decisions for name, cost in costs.items()} == {
        "prompt": 6,
        "16 tokens": 6,
    }
    assert measure_judging(make_scorer(None), ["One?"], rounds=1) is None
