"""Labelled rows, prices and a target for the routing benchmarks."""

import numpy as np

from outrider.router.calibration import CalibrationTarget, Prices, StageRows
from outrider.router.costs import TokenPrices
from outrider.router.features import FloatRows

PRICES: Prices = {
    "small": TokenPrices(prompt=1.0, cached_prompt=0.0, completion=1.0),
    "large": TokenPrices(prompt=10.0, cached_prompt=0.0, completion=10.0),
}


TARGET = CalibrationTarget(recovered_gap=0.95)


def make_rows(number: int = 400, *, seed: int = 0) -> StageRows:
    """Prompts on which each later stage is the better judge, and the large model wins most."""
    rng = np.random.default_rng(seed)
    strong = (rng.random(number) < 0.9).astype(float)
    weak = strong * (rng.random(number) < 0.6)
    gain = strong - weak

    def judged(noise: float) -> FloatRows:
        return np.asarray(1.0 - gain + rng.normal(0.0, noise, size=number)).clip(0.0, 2.0)

    return StageRows(
        text=judged(1.0),
        prompt=judged(0.5),
        answer=judged(0.15),
        weak=weak,
        strong=strong,
        num_prompt_tokens=np.full(number, 20.0),
        num_weak_tokens=rng.integers(5, 60, size=number).astype(float),
        num_strong_tokens=rng.integers(5, 60, size=number).astype(float),
    )


ROWS = make_rows()
