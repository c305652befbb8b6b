"""Calibrated edge probabilities against what really happened."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.budget.calibration import MODEL_SILENT, EdgeCalibration, pool_adjacent_violators
from outrider.verifier.token_tree import SOURCE_BIT

MODEL, SUFFIX = SOURCE_BIT["model"], SOURCE_BIT["suffix"]


def teach(
    calibration: EdgeCalibration,
    truth: dict[float, float],
    *,
    count: int = 3000,
    sources: int = MODEL,
) -> None:
    rng = random.Random(0)
    for _ in range(count):
        confidence = rng.choice(list(truth))
        calibration.observe(
            confidence,
            rng.random() < truth[confidence],
            sources=sources,
            depth=1,
            is_greedy=True,
        )


def ask(calibration: EdgeCalibration, confidence: float, *, sources: int = MODEL) -> float:
    return calibration.of_requests(is_greedy=True)(confidence, sources, 1)


def test_a_source_is_believed_until_something_is_known() -> None:
    assert ask(EdgeCalibration(), 0.37) == 0.37


def test_confidences_become_what_they_turned_out_to_be_worth() -> None:
    calibration = EdgeCalibration()
    truth = {0.15: 0.1, 0.55: 0.2, 0.92: 0.5, 0.99: 0.8}
    teach(calibration, truth)
    for confidence, chance in truth.items():
        assert ask(calibration, confidence) == pytest.approx(chance, abs=0.06)


def test_sources_and_depths_are_kept_apart() -> None:
    calibration = EdgeCalibration()
    teach(calibration, {0.9: 0.1}, sources=SUFFIX)
    assert ask(calibration, 0.9, sources=SUFFIX) < 0.2
    assert ask(calibration, 0.9, sources=MODEL) == 0.9
    assert ask(calibration, 0.9, sources=MODEL | SUFFIX) == 0.9
    assert ask(calibration, 0.9, sources=SUFFIX | MODEL_SILENT) == 0.9
    # What was never seen there is taken to be as elsewhere, until it is seen.
    deep = calibration.of_requests(is_greedy=False)
    assert deep(0.9, SUFFIX, 20) == pytest.approx(0.1, abs=0.06)
    for _ in range(200):
        calibration.observe(0.9, True, sources=SUFFIX, depth=20, is_greedy=False)
    assert deep(0.9, SUFFIX, 20) > 0.85
    assert ask(calibration, 0.9, sources=SUFFIX) < 0.2


def test_old_outcomes_fade() -> None:
    calibration = EdgeCalibration()
    teach(calibration, {0.9: 0.05})
    teach(calibration, {0.9: 0.95})
    assert ask(calibration, 0.9) > 0.88


@given(seed=st.integers(0, 1000))
def test_more_confidence_never_means_less(seed: int) -> None:
    rng = random.Random(seed)
    calibration = EdgeCalibration()
    for _ in range(400):
        calibration.observe(
            rng.random(), rng.random() < 0.5, sources=MODEL, depth=3, is_greedy=True
        )
    bins = [0.01, 0.035, 0.075, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.965]
    probability = calibration.of_requests(is_greedy=True)
    chances = [probability(value, MODEL, 3) for value in bins]
    assert all(0.0 < chance < 1.0 for chance in chances)
    # Within a bin a confidence shifts the result as it is; from bin to bin the fit never falls by
    # more than half of what the two confidences differ by.
    assert all(right > left - 0.1 for left, right in itertools.pairwise(chances))


@given(points=st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10.0)), min_size=1, max_size=30))
def test_pooling_never_falls_and_keeps_the_mean(points: list[tuple[float, float]]) -> None:
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    fitted = pool_adjacent_violators(values, weights)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(fitted))
    kept = sum(f * w for f, w in zip(fitted, weights, strict=True))
    assert kept == pytest.approx(sum(v * w for v, w in points))
    if values == sorted(values):
        assert fitted == values
