import numpy as np
import pytest

from outrider.router.features import FloatRows
from outrider.router.stacking import StageData, fit_stage, gain, gain_error


def stage_data(inputs: FloatRows, *scores: FloatRows) -> StageData:
    num_rows = len(inputs)
    return StageData(
        inputs=inputs,
        scores=scores,
        folds=np.arange(num_rows) % 5,
        num_folds=5,
        weights=np.ones(num_rows),
    )


def test_of_penalties_that_do_equally_well_the_strongest_is_taken() -> None:
    rng = np.random.default_rng(0)
    scores = (rng.random(300) < 0.5).astype(np.float64)
    data = stage_data(rng.normal(size=(300, 3)), scores)
    assert fit_stage(data, (3.0, 0.5, 1.0)).inverse_penalty == 0.5


def test_a_penalty_that_does_worse_is_not_taken() -> None:
    rng = np.random.default_rng(0)
    shared, telling = 10.0 * rng.normal(size=400), rng.normal(size=400)
    # What tells the label is a small difference of two large numbers: it needs large weights.
    inputs = np.stack((shared + telling, shared - telling), axis=1)
    scores = (telling + 0.1 * rng.normal(size=400) > 0.0).astype(np.float64)
    fitted = fit_stage(stage_data(inputs, scores), (1e-7, 1.0))
    assert fitted.inverse_penalty == 1.0
    assert fitted.gain_error < 0.05
    assert fitted.gain_error == gain_error([scores], fitted.held_out, np.ones(400))


def test_gain_by_hand() -> None:
    weak, strong = np.array([0.0, 1.0, 0.25]), np.array([1.0, 0.5, 1.0])
    assert gain([weak, strong]).tolist() == [1.0, -0.5, 0.75]
    assert gain([weak]).tolist() == [1.0, 0.0, 0.75]
    weights = np.array([1.0, 3.0, 0.0])
    judged = np.array([[0.5, 0.5, 9.0], [0.5, 0.5, 9.0]])
    assert gain_error([weak, strong], judged, weights) == pytest.approx((1.0 + 3 * 0.25) / 4)
