from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.model import experts
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.passes.step_times import (
    RunningStepTimes,
    StepTimeCurve,
    follow_step_times,
    profile_step_times,
    warm_up_passes,
)
from outrider.kernels.experts.route import Routed, RoutingRule, route
from tests.engines import tiny_pair
from tests.models import save_hf_model

POINTS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(1e-5, 1.0)),
    min_size=2,
    max_size=12,
    unique_by=lambda point: point[0],
).map(sorted)


@given(points=POINTS)
def test_a_curve_never_falls_whatever_was_measured(points: list[tuple[int, float]]) -> None:
    rows, seconds = zip(*points, strict=True)
    curve = StepTimeCurve.from_points(rows, seconds)
    values = [curve(number) for number in range(rows[-1] + 50)]
    assert all(left <= right + 1e-12 for left, right in pairwise(values))
    assert values[0] == values[rows[0]] == min(seconds)
    assert values[rows[-1]] == pytest.approx(seconds[-1])
    # Smoothing only takes away what a larger pass disproves.
    assert all(curve(number) <= second + 1e-12 for number, second in points)


def test_a_curve_without_noise_keeps_its_points() -> None:
    curve = StepTimeCurve.from_points((1, 4, 10), (1.0, 2.5, 4.0))
    assert [curve(rows) for rows in (0, 1, 2, 4, 7, 10, 14)] == [1, 1, 1.5, 2.5, 3.25, 4, 5]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_context"),
    [(64, 16, None), (2, 4, None), (5, 4, None), (16, 16, None), (64, 16, 20), (64, 16, 2)],
)
def test_profiling_fits_the_cache_and_leaves_it_empty(
    num_blocks: int, block_size: int, max_context: int | None
) -> None:
    runner = ModelRunner(
        model=tiny_pair().small,
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=max_context,
    )
    progress: list[tuple[int, int]] = []
    curve = profile_step_times(runner, on_progress=lambda *step: progress.append(step))
    assert runner.pool.num_used == 0
    assert all(seconds > 0 for seconds in curve.seconds)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert progress == [(done, len(progress)) for done in range(1, len(progress) + 1)]
    assert len(progress) % 6 == 0  # one round to warm up and five to measure
    assert curve(1) <= curve(64)


def test_profiling_publishes_nothing() -> None:
    runner = ModelRunner(model=tiny_pair().small, num_blocks=32)
    profile_step_times(runner)
    assert not any(runner.pool.is_published(block) for block in range(32))


@pytest.fixture
def tiny_mixture(tmp_path: Path) -> DecoderModel:
    save_hf_model("qwen3-moe", tmp_path, num_experts=32, num_experts_per_tok=2)
    return DecoderModel.load(str(tmp_path), dtype="float32")


@pytest.mark.slow_cases
@pytest.mark.parametrize("measure", [profile_step_times, warm_up_passes])
def test_timed_rows_wake_experts_as_distinct_tokens_do(
    tiny_mixture: DecoderModel,
    monkeypatch: pytest.MonkeyPatch,
    measure: Callable[[ModelRunner], object],
) -> None:
    woken: dict[int, set[int]] = {}  # rows of a pass: experts that one of its layers read

    def counted(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> Routed:
        routed = route(logits, rule, correction)
        woken.setdefault(len(logits), set()).add(len(routed.experts.unique()))
        return routed

    monkeypatch.setattr(experts, "route", counted)
    measure(ModelRunner(model=tiny_mixture, num_blocks=32))
    # n rows that choose 2 of 32 experts at random wake 32 (1 - (1 - 2/32)^n) of them; attention
    # makes rows of random layers somewhat alike.
    assert woken[1] == {2}
    assert min(woken[8]) > 5
    assert min(woken[16]) > 10


@pytest.mark.slow
def test_timed_tokens_are_the_same_in_every_pass_and_in_a_small_vocabulary(
    tiny_mixture: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, set[tuple[int, ...]]] = {}  # rows of a pass: its tokens
    runner = ModelRunner(model=tiny_mixture, num_blocks=32)
    forward = runner.forward

    def noted(slices: Sequence[ForwardSlice], *others: Any) -> PassOutput:
        (piece,) = slices
        seen.setdefault(len(piece.token_ids), set()).add(tuple(piece.token_ids))
        return forward(slices, *others)

    monkeypatch.setattr(runner, "forward", noted)
    monkeypatch.setattr(ModelRunner, "vocab_size", 60)
    profile_step_times(runner)
    assert all(len(passes) == 1 for passes in seen.values())
    for rows, (tokens,) in seen.items():
        assert len(set(tokens)) == min(rows, 60)
        assert max(tokens) < 60


def test_running_times_follow_the_machine_and_forget_a_bad_moment() -> None:
    curve = StepTimeCurve.from_points((1, 8, 32), (1.0, 1.5, 4.0))
    times = RunningStepTimes(curve)
    for _ in range(300):
        times.observe(1, 2.0)
    assert times(1) == pytest.approx(2.0, rel=0.05)
    assert 4.0 < times(32) < 8.5  # not seen, but the machine has become slower
    times.observe(32, 400.0)
    after_a_bad_moment = times(32)
    for _ in range(2000):
        times.observe(1, 1.0)
    assert times(32) < 0.75 * after_a_bad_moment
    times.observe(1000, 9.0)  # a prompt: no news about the curve
    assert times(1) == pytest.approx(1.0, rel=0.05)


def test_a_followed_runner_reports_its_passes() -> None:
    runner = ModelRunner(model=tiny_pair().small, num_blocks=32)
    times = follow_step_times(runner)
    before = times(1)
    assert runner.on_pass is not None
    runner.on_pass(1, 100 * before)
    assert times(1) > before


def test_long_contexts_cost_more_by_row() -> None:
    curve = StepTimeCurve.from_points((1, 8), (1.0, 1.5), context=100.0, row_context_s=0.001)
    assert curve(8, 100.0) == curve(8) == pytest.approx(1.5)
    assert curve(8, 600.0) == pytest.approx(1.5 + 8 * 0.5)
    times = RunningStepTimes(curve)
    assert times(8, 600.0) == pytest.approx(5.5)
    assert times.compared(1, 8, 600.0)[-1] == pytest.approx(5.5)
    assert times.compared(1, 8)[[0, -1]].tolist() == pytest.approx([1.0, 1.5])
    # A slow pass at a long context is no news about the machine.
    for _ in range(50):
        times.observe(8, 5.5, 600.0)
    assert times(8) == pytest.approx(1.5)


@pytest.mark.parametrize("num_rows", [0, 1, 700, 8191, 8200])
def test_the_table_says_what_the_single_times_say(num_rows: int) -> None:
    curve = StepTimeCurve.from_points((1, 8), (1.0, 1.5), context=10.0, row_context_s=0.001)
    times = RunningStepTimes(curve)
    times.observe(8, 3.0)
    times.observe(1, times(1))  # what was used just now is not doubted
    expected = [times(rows, 50.0) for rows in range(num_rows + 1)]
    assert times.compared(0, num_rows, 50.0).tolist() == pytest.approx(expected, rel=0.002)
