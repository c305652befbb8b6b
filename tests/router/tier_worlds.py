"""A small labelled world of three models, and a router whose chances are known."""

from collections.abc import Sequence

import numpy as np

from outrider.router.calibration import Calibration, OperatingPoint
from outrider.router.dataset import LabelledPrompts
from outrider.router.ladder import Ladder
from outrider.router.scorer import RouterScorer
from outrider.router.tier_labels import TierTerms, by_cost
from tests.router.routers import SMALL

MINI, MID, BIG = "mini", "mid", "big"
TERMS = tuple(
    TierTerms(name=name, cost=cost) for name, cost in ((MINI, 1.0), (MID, 2.0), (BIG, 10.0))
)


def three_tiers(num_rows: int, seed: int, terms: Sequence[TierTerms] = TERMS) -> LabelledPrompts:
    """Sums: mini knows up to two digits, mid up to four, big all; tiers without terms are none."""
    rng = np.random.default_rng(seed)
    digits = rng.integers(1, 7, num_rows)
    left, right = (rng.integers(10 ** (digits - 1), 10**digits) for _ in range(2))
    drawn = rng.random((3, num_rows))
    scores = {
        MINI: (drawn[0] < np.where(digits <= 2, 0.95, 0.1)).astype(float),
        MID: (drawn[1] < np.where(digits <= 4, 0.95, 0.2)).astype(float),
        BIG: (drawn[2] < 0.97).astype(float),
    }
    plain = LabelledPrompts(
        prompts=[f"What is {x} + {y}?" for x, y in zip(left, right, strict=True)],
        weak=scores[MINI],
        strong=None,
        sha256="2" * 64,
    )
    named = {one.name for one in terms}
    labels = {name: column for name, column in scores.items() if name in named}
    return plain.for_tiers(by_cost(terms, labels, {}))


def ladder_of(
    *costs: float,
    accuracies: Sequence[float] = (),
    unlabelled: tuple[str, ...] = (),
    names: Sequence[str] = (MINI, MID, BIG),
) -> Ladder:
    return Ladder(
        names=tuple(names[: len(costs)]),
        costs=costs,
        accuracies=tuple(accuracies) or (0.5,) * len(costs),
        unlabelled=unlabelled,
    )


def scorer_of(
    chances: Sequence[float], ladder: Ladder | None = None, threshold: float = 0.9
) -> RouterScorer:
    """The same chances for every prompt."""
    point = OperatingPoint(
        threshold=threshold,
        band=None,
        strong_share=0.5,
        watched_share=0.0,
        accuracy=0.8,
        relative_accuracy=0.9,
    )
    calibration = Calibration(
        chosen=point, points=(point,), stage="text", quality_deciles=(0.0,) * 11
    )
    odds = np.array(chances)
    return RouterScorer(
        features=SMALL,
        weight=np.zeros((len(chances), SMALL.num_features)),
        bias=np.log(odds / (1.0 - odds)),
        threshold=threshold,
        calibration=calibration,
        tiers=ladder or ladder_of(1.0, 2.0, 10.0, accuracies=chances),
    )
