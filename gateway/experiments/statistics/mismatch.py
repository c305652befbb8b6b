"""Sample ratio mismatch: are the arms as large as their weights say? If not, no result is valid.

While it runs: an always valid test of multinomial counts, a Dirichlet mixture against the weights
(Lindon and Malek 2022). Requests of a unit go to one arm together, so where a unit has several
requests, it is tested by buckets of units instead: a normal mixture of how far the arm's requests
are from its weight, with the variance that the buckets show. The chi-square test, valid at the end
of an experiment only, is reported beside it where requests are independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from outrider.gateway.experiments.statistics.clusters import design_effects
from outrider.gateway.experiments.statistics.interval import finite
from outrider.gateway.experiments.statistics.mixture import TUNED_FOR, FloatArray, prior_requests
from outrider.gateway.experiments.statistics.special import chdtrc, gammaln

MISMATCH_ALPHA: Final = 0.01
"""At or below this p-value the shares are reported as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Observed requests and expected shares of the arms, with the results of the tests."""

    observed: tuple[int, ...]
    expected_shares: tuple[float, ...]
    p_value: float
    """Always valid."""
    chi_square_p: float = math.nan
    """Not always valid; NaN where requests are not independent."""

    @property
    def is_mismatch(self) -> bool:
        """Return whether assignment or counting is surely wrong."""
        return self.p_value <= MISMATCH_ALPHA

    def document(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "observed": list(self.observed),
            "expected_shares": list(self.expected_shares),
            "p_value": finite(self.p_value),
            "chi_square_p": finite(self.chi_square_p),
            "is_mismatch": self.is_mismatch,
        }


def log_multinomial_evidence(counts: FloatArray, shares: FloatArray, prior: float) -> FloatArray:
    """Log of the Dirichlet-multinomial mixture martingale against the shares.

    `counts`: shape (..., k); `shares`: shape (k,), positive, sum 1; the Dirichlet is
    prior x shares. The result has shape (...).
    """
    centred = prior * shares
    n = counts.sum(axis=-1)
    logs: FloatArray = (
        gammaln(prior)
        - gammaln(prior + n)
        + (gammaln(centred + counts) - gammaln(centred)).sum(axis=-1)
        - (counts * np.log(shares)).sum(axis=-1)
    )
    return logs


def log_bucket_evidence(counts: FloatArray, shares: FloatArray) -> FloatArray:
    """Log of the normal mixture martingale of each arm's requests against its share, by buckets.

    `counts`: shape (..., k, 64), requests by arm and bucket. The result: shape (..., k).
    """
    everything = counts.sum(axis=-2, keepdims=True)  # [..., 1, 64]
    expected = shares[:, None]  # [k, 1]
    n = everything.sum(axis=-1)  # [..., 1]
    weights = np.broadcast_to(everything, counts.shape)
    # under equality d = count - share x all has mean zero in each bucket; the design effect of
    # "is of this arm" gives its variance in units of n share (1 - share)
    effects = design_effects(weights, counts, counts, MISMATCH_ALPHA)  # [..., k]
    independent = n * (expected * (1.0 - expected))[..., 0]  # [..., k]
    distance = (counts - expected * everything).sum(axis=-1)
    eta = n / effects / prior_requests(MISMATCH_ALPHA, tuned_for=2.0 * TUNED_FOR)
    squared = np.divide(
        np.square(distance), independent * effects, out=np.zeros_like(distance), where=n > 0.0
    )
    logs: FloatArray = squared / 2.0 * eta / (1.0 + eta) - np.log1p(eta) / 2.0
    return logs


def sample_ratio_mismatch(
    counts: FloatArray, weights: Sequence[float], *, is_independent: bool
) -> Mismatch:
    """Test requests by arm and bucket, shape (k, 64), against weights (k), positive, in any scale.

    `is_independent`: each request is a unit of its own. Raises ValueError for weights that are not
    positive or of another number than the arms.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != counts.shape[:1] or not bool((shares > 0.0).all()):
        raise ValueError(f"{counts.shape[0]} arms need as many positive weights, not {weights}")
    shares = shares / shares.sum()
    observed = counts.sum(axis=-1)
    chi_square_p = math.nan
    if len(shares) < 2 or observed.sum() == 0.0:
        p_value = 1.0
    elif is_independent:
        prior = prior_requests(MISMATCH_ALPHA, num_arms=len(shares) - 1, tuned_for=2.0 * TUNED_FOR)
        p_value = _p_value(float(log_multinomial_evidence(observed, shares, prior)))
        expected = observed.sum() * shares
        distance = float((np.square(observed - expected) / expected).sum())
        chi_square_p = float(chdtrc(len(shares) - 1, distance))
    else:
        # two arms are one question; each of more is one of its own
        num_tests = 1 if len(shares) == 2 else len(shares)
        p_value = min(1.0, num_tests * _p_value(float(log_bucket_evidence(counts, shares).max())))
    return Mismatch(
        observed=tuple(round(float(count)) for count in observed),
        expected_shares=tuple(float(share) for share in shares),
        p_value=p_value,
        chi_square_p=chi_square_p,
    )


def _p_value(evidence: float) -> float:
    return math.exp(-max(0.0, evidence))
