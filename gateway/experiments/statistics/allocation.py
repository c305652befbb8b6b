"""Adaptive allocation on attainment: shares of the traffic that follow the results so far.

Shares (attainment, errors) stay valid under any of this: their martingales hold in any order of
arms (binomial.py); means then use the product of arms (means.py, `is_adaptive`). No longer valid
are the sample ratio test and plain averages, which are slightly biased at any stopping time.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

_LEAST_GAP: Final = 1e-4
"""Arms nearer than this to the best one are taken to be so far away."""


def thompson_shares(
    successes: Sequence[float],
    trials: Sequence[float],
    rng: np.random.Generator,
    num_draws: int = 10_000,
) -> list[float]:
    """Return each arm's probability to be the best: Thompson (1933), with uniform priors.

    Raises ValueError for no arms, or counts that are none.
    """
    _check(successes, trials)
    won = np.asarray(successes, dtype=np.float64)
    lost = np.asarray(trials, dtype=np.float64) - won
    draws = rng.beta(1.0 + won, 1.0 + lost, size=(num_draws, len(won)))
    wins = np.bincount(np.argmax(draws, axis=1), minlength=len(won))
    return [float(count) / num_draws for count in wins]


def track_and_stop_shares(successes: Sequence[float], trials: Sequence[float]) -> list[float]:
    """Return the shares that identify the best arm soonest: Garivier and Kaufmann (2016).

    Their theorem 5 and lemma 4 for Bernoulli arms: with the best arm's share 1 (before
    normalising), arm a has x_a(y), at which its distance from the best is y; y solves
    sum_a d(best, m_a) / d(a, m_a) = 1 with m_a = (best + x_a a) / (1 + x_a). Estimates are
    (successes + 1) / (trials + 2). Raises ValueError for no arms, or counts that are none.
    """
    _check(successes, trials)
    count = len(successes)
    if count == 1:
        return [1.0]
    means = [(won + 1.0) / (all_ + 2.0) for won, all_ in zip(successes, trials, strict=True)]
    best = max(range(count), key=means.__getitem__)
    top = means[best]
    others = [min(mean, top - min(_LEAST_GAP, top / 2.0)) for mean in means]
    rest = [index for index in range(count) if index != best]
    low, high = 0.0, min(_divergence(top, others[index]) for index in rest)
    for _ in range(60):
        level = (low + high) / 2.0
        if sum(_ratio(top, others[index], level) for index in rest) < 1.0:
            low = level
        else:
            high = level
    parts = [1.0] * count
    for index in rest:
        parts[index] = _part(top, others[index], low)
    total = sum(parts)
    return [part / total for part in parts]


def bounded_shares(shares: Sequence[float], min_share: float) -> list[float]:
    """Return shares that sum to 1, each at least `min_share`, the rest in proportion.

    Raises ValueError where so many arms cannot each have that much.
    """
    room = 1.0 - min_share * len(shares)
    if min_share < 0.0 or room < -1e-9:
        raise ValueError(f"{len(shares)} arms cannot each have a share of {min_share} or more")
    total = sum(shares)
    return [min_share + max(0.0, room) * share / total for share in shares]


def _check(successes: Sequence[float], trials: Sequence[float]) -> None:
    if not successes or len(successes) != len(trials):
        raise ValueError(f"{len(successes)} successes and {len(trials)} trials: one of each an arm")
    if any(not 0.0 <= won <= all_ for won, all_ in zip(successes, trials, strict=True)):
        raise ValueError(f"successes {successes} are not between 0 and the trials {trials}")


def _divergence(p: float, q: float) -> float:
    """Return the Kullback-Leibler divergence of Bernoulli distributions; both inside (0, 1)."""
    return p * math.log(p / q) + (1.0 - p) * math.log((1.0 - p) / (1.0 - q))


def _distance(top: float, mean: float, part: float) -> float:
    middle = (top + part * mean) / (1.0 + part)
    return _divergence(top, middle) + part * _divergence(mean, middle)


def _part(top: float, mean: float, level: float) -> float:
    """Return the x at which the distance is `level`, below its limit d(top, mean)."""
    low, high = 0.0, 1.0
    while _distance(top, mean, high) < level and high < 1e12:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _distance(top, mean, middle) < level else (low, middle)
    return (low + high) / 2.0


def _ratio(top: float, mean: float, level: float) -> float:
    part = _part(top, mean, level)
    middle = (top + part * mean) / (1.0 + part)
    below = _divergence(mean, middle)
    return _divergence(top, middle) / below if below > 0.0 else math.inf
