"""Adaptive allocation: more traffic for arms that attain their objectives more often."""

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from outrider.gateway.experiments.statistics.allocation import (
    bounded_shares,
    thompson_shares,
    track_and_stop_shares,
)
from outrider.gateway.experiments.statistics.clusters import design_effect
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.settings.experiment_rules import AllocationRule

_ALPHA: Final = 0.05
_LEAST_CHANGE: Final = 0.02
"""Smaller changes would move units to other arms without benefit."""


def next_weights(
    rule: AllocationRule,
    weights: Mapping[str, float],
    totals: Mapping[str, ArmTotals],
    *,
    is_independent: bool = False,
) -> dict[str, float] | None:
    """Return the arms' new weights, with sum 1. None where they stay as they are.

    `weights` are those in force, of the arms that take traffic. None as well while an arm has
    fewer requests than the rule wants. Where requests of a unit are alike, they count as fewer.
    The same totals always give the same weights, so that gateways agree.
    """
    arms = sorted(weights)
    if rule.kind == "fixed" or len(arms) < 2:
        return None
    counts = {}
    for arm in arms:
        attained = totals[arm].metrics["attained"] if arm in totals else None
        if attained is None or attained.n < max(1, rule.min_requests):
            return None
        effect = 1.0 if is_independent else design_effect(attained, _ALPHA)
        counts[arm] = (attained.sum / effect, attained.n / effect)
    successes = [counts[arm][0] for arm in arms]
    trials = [counts[arm][1] for arm in arms]
    if rule.kind == "thompson":
        shares = thompson_shares(successes, trials, _generator(totals, arms))
    else:
        shares = track_and_stop_shares(successes, trials)
    shares = bounded_shares(shares, min(rule.min_share, 1.0 / len(arms)))
    wanted = {arm: float(share) for arm, share in zip(arms, shares, strict=True)}
    before = sum(weights.values())
    changes = (abs(wanted[arm] - weights[arm] / before) for arm in arms)
    return wanted if max(changes) >= _LEAST_CHANGE else None


def _generator(totals: Mapping[str, ArmTotals], arms: list[str]) -> np.random.Generator:
    """Return a generator whose draws depend on the totals alone."""
    words = [
        f"{t.experiment}:{t.version}/{t.arm}={t.num_requests}" for t in (totals[a] for a in arms)
    ]
    seed = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "big"))
