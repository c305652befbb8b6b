"""Simulated experiments: the statistics' error rate, and the time to detect a difference.

All experiments of a setting run side by side as arrays, and are looked at again and again; the
first look at which the difference is declared counts.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.experiments.statistics.binomial import are_different
from outrider.gateway.experiments.statistics.clusters import design_effects
from outrider.gateway.experiments.statistics.mixture import TUNED_FOR, FloatArray, prior_requests
from outrider.gateway.experiments.totals import NUM_UNIT_BUCKETS

_ORDINARY_Z: Final = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentSetup:
    """Two arms whose requests attain their objectives with the given shares.

    `num_requests` of both arms together; one look every `look_every` of them. `arm_weight`: share
    of the traffic that the second arm gets, request by request, at random.
    """

    control_share: float
    arm_share: float
    num_requests: int
    num_experiments: int = 2000
    look_every: int = 1
    arm_weight: float = 0.5
    alpha: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredSetup:
    """As AttainmentSetup, with units: each has its own share, drawn from a beta distribution.

    `correlation` is that of two requests of one unit; `num_units` of each experiment send
    requests in turn at random, `requests_per_look` in all between two looks.
    """

    control_share: float
    arm_share: float
    correlation: float
    num_units: int
    num_looks: int
    requests_per_look: int
    num_experiments: int = 500
    alpha: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The request at which each experiment was decided (0: never), and an ordinary test's result.

    `decided_at`: shape (experiments,). `ordinary_share`: experiments in which the usual z test of
    the same level, made at each look, declared a difference at some time.
    """

    decided_at: NDArray[np.int64]
    num_requests: int
    ordinary_share: float

    @property
    def share_decided(self) -> float:
        """Return the share of experiments decided; for equal shares, these are false alarms."""
        return float((self.decided_at > 0).mean())

    def share_decided_by(self, num_requests: int) -> float:
        """Return the share of experiments decided within so many requests of both arms together."""
        return float(((self.decided_at > 0) & (self.decided_at <= num_requests)).mean())

    def requests_for(self, power: float) -> int | None:
        """Return the requests of both arms until this share is decided; None: never."""
        decided = np.sort(self.decided_at[self.decided_at > 0])
        needed = math.ceil(power * len(self.decided_at))
        return int(decided[needed - 1]) if 0 < needed <= len(decided) else None


def simulate_attainment(setup: AttainmentSetup, rng: np.random.Generator) -> SimulationResult:
    """Simulate independent requests, looked at continuously."""
    size = setup.num_experiments
    prior = prior_requests(setup.alpha, num_arms=2)
    counts = np.zeros((4, size))  # successes and failures of the control, then of the arm
    decided = np.zeros(size, dtype=np.int64)
    ordinary = np.zeros(size, dtype=bool)
    shares = (setup.control_share, setup.arm_share)
    for seen in range(setup.look_every, setup.num_requests + 1, setup.look_every):
        of_arm = rng.binomial(setup.look_every, setup.arm_weight, size)
        for place, requests in enumerate((setup.look_every - of_arm, of_arm)):
            successes = rng.binomial(requests, shares[place])
            counts[2 * place] += successes
            counts[2 * place + 1] += requests - successes
        _look(counts, prior, setup.alpha, decided, seen)
        ordinary |= _ordinary(counts)
    return SimulationResult(
        decided_at=decided,
        num_requests=setup.num_requests,
        ordinary_share=float(ordinary.mean()),
    )


def simulate_clustered(setup: ClusteredSetup, rng: np.random.Generator) -> SimulationResult:
    """Simulate units of several requests; counts are corrected by the buckets' design effect."""
    size, units = setup.num_experiments, setup.num_units
    strength = (1.0 - setup.correlation) / setup.correlation
    in_arm = rng.random((size, units)) < 0.5
    share = np.where(in_arm, setup.arm_share, setup.control_share)
    unit_share = rng.beta(strength * share, strength * (1.0 - share))
    bucket = rng.integers(NUM_UNIT_BUCKETS, size=(size, units))
    cell = (np.arange(size)[:, None] * 2 + in_arm) * NUM_UNIT_BUCKETS + bucket
    shape = (size, 2, NUM_UNIT_BUCKETS)
    requests, successes = np.zeros(shape), np.zeros(shape)
    prior = prior_requests(setup.alpha, num_arms=2)
    decided = np.zeros(size, dtype=np.int64)
    ordinary = np.zeros(size, dtype=bool)
    length = size * 2 * NUM_UNIT_BUCKETS
    for look in range(1, setup.num_looks + 1):
        sent = rng.poisson(setup.requests_per_look / units, (size, units))
        won = rng.binomial(sent, unit_share)
        requests += np.bincount(cell.ravel(), sent.ravel(), length).reshape(shape)
        successes += np.bincount(cell.ravel(), won.ravel(), length).reshape(shape)
        effects = design_effects(requests, successes, successes, setup.alpha)  # [size, 2]
        attained, sent_in_all = successes.sum(axis=-1), requests.sum(axis=-1)
        raw = np.stack(
            [attained[:, 0], (sent_in_all - attained)[:, 0],
             attained[:, 1], (sent_in_all - attained)[:, 1]]
        )  # fmt: skip
        _look(
            raw / np.repeat(effects.T, 2, axis=0), prior, setup.alpha, decided,
            look * setup.requests_per_look,
        )  # fmt: skip
        ordinary |= _ordinary(raw)
    return SimulationResult(
        decided_at=decided,
        num_requests=setup.num_looks * setup.requests_per_look,
        ordinary_share=float(ordinary.mean()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSetup:
    """Two arms with lognormal values (median 1, `sigma` of the logarithm); the arm's are `factor`
    times as great. `num_requests` and `look_every` are of each arm."""

    sigma: float
    factor: float
    num_requests: int
    look_every: int
    min_requests: int
    num_experiments: int = 2000
    alpha: float = 0.05


def simulate_means(setup: MeanSetup, rng: np.random.Generator) -> SimulationResult:
    """Simulate independent values; means are compared as in means.py."""
    size = setup.num_experiments
    sums, squares = np.zeros((2, size)), np.zeros((2, size))
    decided = np.zeros(size, dtype=np.int64)
    ordinary = np.zeros(size, dtype=bool)
    prior = prior_requests(setup.alpha, tuned_for=2.0 * TUNED_FOR)
    for n in range(setup.look_every, setup.num_requests + 1, setup.look_every):
        values = rng.lognormal(0.0, setup.sigma, (2, size, setup.look_every))
        values[1] *= setup.factor
        sums += values.sum(axis=-1)
        squares += np.square(values).sum(axis=-1)
        if n < setup.min_requests:
            continue
        variances = (squares - np.square(sums) / n) / (n - 1) / n
        z_squared = np.square((sums[1] - sums[0]) / n) / variances.sum(axis=0)
        eta = 2.0 * n / prior
        evidence = z_squared / 2.0 * eta / (1.0 + eta) - math.log1p(eta) / 2.0
        decided[(decided == 0) & (evidence >= -math.log(setup.alpha))] = 2 * n
        ordinary |= z_squared > _ORDINARY_Z**2
    return SimulationResult(
        decided_at=decided,
        num_requests=2 * setup.num_requests,
        ordinary_share=float(ordinary.mean()),
    )


def _look(
    counts: FloatArray, prior: float, alpha: float, decided: NDArray[np.int64], seen: int
) -> None:
    """Note in `decided` those experiments whose difference shows now. `counts`: shape (4, n)."""
    open_ = np.flatnonzero(decided == 0)
    decided[open_[are_different(counts[:, open_], prior, alpha)]] = seen


def _ordinary(counts: FloatArray) -> NDArray[np.bool_]:
    """Return whether the usual z test of two shares at 5 % declares a difference. Shape (n,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = counts[0] + counts[1], counts[2] + counts[3]
        common = (counts[0] + counts[2]) / (first + second)
        error = np.sqrt(common * (1.0 - common) * (1.0 / first + 1.0 / second))
        distance = np.abs(counts[0] / first - counts[2] / second)
        is_usual = (first >= 30) & (second >= 30)
        return np.asarray(is_usual & (distance > _ORDINARY_Z * error))
