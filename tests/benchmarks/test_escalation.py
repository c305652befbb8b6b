from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing.bench_cascade import median_interval
from benchmarks.routing.escalation import (
    agreement,
    committed,
    escalated,
    nearest,
    plain,
    restarted,
    watched,
)
from benchmarks.shared.driving import make_requests
from outrider.engine.request import EngineRequest
from outrider.router.watch import Judgement
from tests.benchmarks.benches import make_bench, make_prompts

answers = st.lists(st.integers(0, 5), max_size=20)


def make_request(temperature: float = 0.0, max_tokens: int = 24) -> EngineRequest:
    (request,) = make_requests(
        make_prompts(1), tier="small", max_tokens=max_tokens, temperature=temperature, seed=3
    )
    return request


class CommitAfter:
    """Waits for so many tokens, and remembers what it was told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.logprobs: list[float] = []
        self.hidden_size = 0
        self.has_ended = False

    def on_prompt(self, hidden_state: Sequence[float] | None) -> Judgement:
        self.hidden_size = len(hidden_state or ())
        return self._judge()

    def on_tokens(self, logprobs: Sequence[float]) -> Judgement:
        self.logprobs += logprobs
        return self._judge()

    def on_time(self) -> Judgement:
        raise AssertionError("nobody measures time here")

    def on_end(self) -> Judgement:
        self.has_ended = True
        return Judgement(action="commit", confidence=1.0, reason="")

    def _judge(self) -> Judgement:
        is_over = len(self.logprobs) >= self.number
        return Judgement(action="commit" if is_over else "hold", confidence=1.0, reason="")


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("after", [1, 16, None])
def test_both_ways_give_the_large_tiers_answer(temperature: float, after: int | None) -> None:
    engine = make_bench().engine
    request = make_request(temperature)
    large = plain(engine, replace(request, tier="large", request_id="large"))
    handed = escalated(engine, watched(replace(request, request_id="handed")), after)
    again = restarted(engine, watched(replace(request, request_id="again")), after)
    assert handed.token_ids == again.token_ids == large.token_ids
    assert len(handed.token_ids) == 24
    for turn in (handed, again):
        assert 0 < turn.decode_s < turn.wall_s
    assert again.num_reused_tokens == 0
    assert 0 <= handed.num_reused_tokens <= 24
    assert not engine.has_work


@pytest.mark.parametrize(("number", "is_ended"), [(5, False), (24, False), (100, True)])
def test_a_committed_answer_is_the_small_tiers_and_is_held_until_then(
    number: int, is_ended: bool
) -> None:
    engine = make_bench().engine
    request = make_request()
    small = plain(engine, request)
    watch = CommitAfter(number)
    turn = committed(engine, watched(replace(request, request_id="watched")), watch)
    assert turn.token_ids == small.token_ids
    assert watch.has_ended == is_ended
    assert len(watch.logprobs) == min(number, 24)
    assert all(value <= 0 for value in watch.logprobs)
    assert watch.hidden_size > 0
    assert 0 < turn.decode_s < turn.wall_s
    assert small.wall_s > 0
    assert not engine.has_work


@given(answers, answers)
def test_agreement_is_a_share_and_whole_only_where_all_is_there(
    small: list[int], large: list[int]
) -> None:
    share = agreement(small, large)
    assert 0 <= share <= 1
    assert agreement(large, large) == 1
    assert agreement([], large) == (0 if large else 1)
    assert agreement([*small, *large], large) >= share


def test_agreement_counts_tokens_in_order() -> None:
    assert agreement([1, 2, 9, 4], [1, 2, 3, 4]) == 0.75
    assert agreement([2, 1], [1, 2]) == 0.5


@given(st.lists(st.floats(0, 1), max_size=12), st.integers(0, 12))
def test_the_nearest_are_distinct_and_differ(shares: list[float], number: int) -> None:
    chosen = nearest(shares, 0.7, number)
    assert len(set(chosen)) == len(chosen) == min(number, sum(share < 1 for share in shares))
    assert all(shares[place] < 1 for place in chosen)


def test_the_nearest_come_first_and_balance_each_other() -> None:
    assert nearest([0.1, 1.0, 0.72, 0.5, 0.69], 0.7, 1) in ([2], [4])
    assert set(nearest([0.1, 1.0, 0.72, 0.5, 0.69], 0.7, 2)) == {2, 4}
    # From above where what is chosen already lies below.
    assert nearest([0.6, 0.81, 0.58], 0.7, 2) == [0, 1]


def test_a_median_over_questions_has_an_interval_around_it() -> None:
    rng = np.random.default_rng(0)
    found = median_interval([rng.normal(2.0, 0.1, size=3).tolist() for _ in range(40)])
    assert found.low < found.estimate < found.high
    assert found.estimate == pytest.approx(2.0, abs=0.05)
    assert found.num_units == 40
