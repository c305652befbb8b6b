"""The predicted wait of a new request, and whether it is admitted."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import InfeasibleObjectiveError
from outrider.engine.queue.slo_queue import SloQueue
from outrider.engine.request import EngineRequest, LatencyObjective
from outrider.engine.ttft_predictor import (
    ForecastCorrection,
    RemainingWork,
    ServiceTimes,
    predict_ttft_s,
)
from outrider.verifier.params import Tier
from tests.engines import assert_idle, make_engine, make_request, random_prompt, tiny_pair

TIMES = {"row_s": 0.01, "token_s": 0.1}


def job(num_rows: int = 0, num_tokens: float = 10, num_blocks: int = 1) -> RemainingWork:
    return RemainingWork(num_rows=num_rows, num_tokens=num_tokens, num_blocks=num_blocks)


# ---- the forecast ----------------------------------------------------------------------------


def test_with_a_free_seat_it_is_the_prompts_in_front_and_the_own_one() -> None:
    wait_s = predict_ttft_s(
        running=[job(num_rows=30), job()],
        ahead=[job(num_rows=50)],
        newcomer=job(num_rows=20),
        num_free_sequences=5,
        num_blocks=100,
        **TIMES,
    )
    assert wait_s == pytest.approx(1.0)


def test_seats_become_free_as_answers_end() -> None:
    def wait_s(num_ahead: int) -> float:
        return predict_ttft_s(
            running=[job(num_tokens=10), job(num_tokens=30)],
            ahead=[job(num_rows=10, num_tokens=5)] * num_ahead,
            newcomer=job(num_rows=10),
            num_free_sequences=0,
            num_blocks=100,
            **TIMES,
        )

    # The first seat is free after 1 s, for one that takes 0.6 s; the second after 3 s.
    assert wait_s(0) == pytest.approx(1.1)
    assert wait_s(1) == pytest.approx(1.7)
    assert wait_s(2) == pytest.approx(2.3)
    assert wait_s(4) > 3.0


def test_blocks_are_waited_for_like_seats() -> None:
    def wait_s(num_blocks: int) -> float:
        return predict_ttft_s(
            running=[job(num_tokens=20, num_blocks=6), job(num_tokens=50, num_blocks=6)],
            ahead=[],
            newcomer=job(num_rows=10, num_blocks=num_blocks),
            num_free_sequences=9,
            num_blocks=3,
            **TIMES,
        )

    assert wait_s(3) == pytest.approx(0.1)
    assert wait_s(9) == pytest.approx(2.1)
    assert wait_s(1000) == pytest.approx(5.1)  # nobody is left to wait for


def test_a_correction_is_learnt_bounded_and_let_go() -> None:
    calibration = ForecastCorrection()
    assert calibration.ratio == 1.0
    for _ in range(60):
        calibration.note(predicted_s=0.5, actual_s=1.0)
    assert calibration.ratio == pytest.approx(2.0, rel=0.02)
    for _ in range(200):
        calibration.note(predicted_s=0.001, actual_s=1000.0)
    assert calibration.ratio == pytest.approx(4.0, rel=0.02)
    for _ in range(200):
        calibration.relax()
    assert calibration.ratio == pytest.approx(1.0, abs=0.01)
    calibration.note(predicted_s=0.0, actual_s=1.0)
    assert math.isfinite(calibration.ratio)


def test_times_are_means_of_what_was_seen() -> None:
    times = ServiceTimes(EngineConfig(prefill_chunk_s=0.1, min_prefill_tokens=4))
    assert times.prefill_row_s("large") == 0.0
    assert times.prefill_rows("large", 0.1) == 256  # enough to learn from
    times.note_pass("large", num_rows=10, elapsed_s=9.0)  # too few rows to say anything
    assert times.row_s("large") is None
    times.note_pass("large", num_rows=100, elapsed_s=0.2)
    times.note_step(0.05)
    assert times.row_s("large") == pytest.approx(0.002)
    assert times.prefill_rows("large", 0.1) == 50
    assert times.prefill_row_s("large", is_alone=True) == pytest.approx(0.002)
    assert times.prefill_row_s("large") == pytest.approx(0.002 + 0.05 / 50)
    for _ in range(30):
        times.note_pass("large", num_rows=100, elapsed_s=2.0)
    assert times.row_s("large") == pytest.approx(0.02, rel=0.01)
    assert times.best_row_s["large"] == pytest.approx(0.002, rel=0.05)
    times.note_pass("large", num_rows=100, elapsed_s=4.0)  # rows get dearer with their context
    assert times.prefill_rows("large", 1.0) == 25


# ---- the gate --------------------------------------------------------------------------------


class Bench:
    """An engine over tiny models that knows its times, and a clock that stands still."""

    def __init__(self, *, row_s: float = 1e-3, max_sequences: int = 2) -> None:
        self.now_s = 100.0
        self.engine: Engine = make_engine(
            tiny_pair(),
            config=EngineConfig(max_sequences=max_sequences),
            speculates=False,
            policy=SloQueue(),
        )
        self.engine._clock = self.clock
        times = self.engine.scheduler.times
        times.note_pass("large", num_rows=100, elapsed_s=100 * row_s)
        times.note_step(0.01)
        # What this machine really takes is no part of these cases.
        times.note_step = lambda elapsed_s: None  # type: ignore[method-assign]
        times.note_pass = lambda tier, **seen: None  # type: ignore[method-assign]
        self._number = 0

    def clock(self) -> float:
        return self.now_s

    def ask(
        self,
        ttft_s: float | None,
        *,
        num_prompt: int = 50,
        refuses: bool = True,
        age_s: float = 0.0,
    ) -> EngineRequest:
        self._number += 1
        tier: Tier = "large"
        request = make_request(
            f"r{self._number}",
            random_prompt(num_prompt, seed=self._number),
            tier=tier,
            max_tokens=20,
        )
        request = replace(
            request,
            arrival_s=self.now_s - age_s,
            objective=LatencyObjective(ttft_s=ttft_s, refuses=refuses),
        )
        self.engine.submit(request)
        return request

    def drain(self) -> None:
        while self.engine.has_work:
            self.now_s += 0.01
            self.engine.step()
        assert_idle(self.engine)
        assert not self.engine._gate._forecasts


def refusal(ask: Callable[[], object]) -> InfeasibleObjectiveError:
    with pytest.raises(InfeasibleObjectiveError) as caught:
        ask()
    return caught.value


def test_an_idle_engine_admits_every_feasible_request() -> None:
    bench = Bench()
    bench.ask(0.2)
    bench.drain()


def test_no_wait_helps_where_the_prompt_itself_takes_too_long() -> None:
    bench = Bench(row_s=0.01)
    error = refusal(lambda: bench.ask(0.2, num_prompt=100))
    assert error.retry_after_s is None
    assert error.predicted_wait_s == pytest.approx(1.0)
    assert "shorten it" in str(error)
    assert not bench.engine.has_work
    assert bench.ask(None, num_prompt=100).request_id in bench.engine._sequences
    bench.drain()


def test_a_full_engine_says_how_long_to_wait_and_means_it() -> None:
    bench = Bench()
    for _ in range(6):
        bench.ask(None)
    for _ in range(4):
        bench.now_s += 0.01
        bench.engine.step()
    error = refusal(lambda: bench.ask(0.1))
    assert error.ttft_s == 0.1
    assert error.predicted_wait_s > 0.1
    assert error.retry_after_s == pytest.approx(error.predicted_wait_s - 0.1)
    assert len(bench.engine._sequences) == 6
    begun_s = bench.now_s
    while bench.now_s < begun_s + error.retry_after_s:
        bench.now_s += 0.01
        bench.engine.step()
    bench.ask(0.1)
    bench.drain()


def test_only_requests_that_prefer_it_are_refused() -> None:
    bench = Bench()
    for _ in range(6):
        bench.ask(None)
    bench.ask(0.001, refuses=False)
    bench.drain()


def test_nothing_is_refused_by_an_engine_that_knows_nothing_yet() -> None:
    engine = make_engine(tiny_pair(), speculates=False)
    objective = LatencyObjective(ttft_s=1e-9, refuses=True)
    engine.submit(replace(make_request("a", random_prompt(40)), objective=objective))
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_time_that_has_passed_since_arrival_counts() -> None:
    bench = Bench()
    refusal(lambda: bench.ask(0.2, age_s=0.5))
    bench.ask(0.2, age_s=0.05)
    bench.drain()


def test_batch_is_not_in_the_way_of_one_that_may_take_its_seat() -> None:
    bench = Bench(max_sequences=1)
    for number in range(3):
        request = make_request(f"batch{number}", random_prompt(50, seed=90 + number))
        bench.engine.submit(replace(request, objective=LatencyObjective(is_batch=True)))
    bench.engine.step()
    bench.ask(0.3)
    refusal(lambda: [bench.ask(0.3) for _ in range(3)])  # one after the other is too slow
    bench.drain()


def test_cached_tokens_do_not_count() -> None:
    bench = Bench(row_s=0.01)
    prompt = random_prompt(100, seed=1)
    for number in range(2):
        request = replace(
            make_request(f"again{number}", prompt, max_tokens=2),
            arrival_s=bench.now_s,
            objective=LatencyObjective(ttft_s=0.5 if number else None, refuses=True),
        )
        bench.engine.submit(request)
        bench.drain()


def test_one_slow_moment_does_not_refuse_requests_for_ever() -> None:
    bench = Bench()
    bench.engine._gate.calibration.note(predicted_s=1e-3, actual_s=1e3)
    for _ in range(40):
        bench.engine._gate.calibration.note(predicted_s=1e-3, actual_s=1e3)
    bench.ask(0.1)  # idle: it is taken in whatever the correction says
    refusal(lambda: bench.ask(0.2, num_prompt=60))
    for _ in range(80):
        try:
            bench.ask(0.2, num_prompt=60)
            break
        except InfeasibleObjectiveError:
            continue
    else:
        pytest.fail("refused for ever")
    bench.drain()


def test_a_forecast_is_compared_with_what_came() -> None:
    bench = Bench()
    bench.ask(5.0)
    for _ in range(3):
        bench.ask(5.0)
    bench.drain()
    assert bench.engine._gate.calibration.ratio != 1.0
    gone = bench.ask(5.0)
    bench.engine.abort(gone.request_id)
    bench.drain()
