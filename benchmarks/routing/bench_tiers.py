"""What do more than two tiers bring over the best pair of them, on public labels with real costs?

Method: five models of RouterBench (its zero-shot rows of ARC-Challenge, MBPP and WinoGrande; see
benchmarks/routing/routerbench.py) by rising cost. A router of all five and one of each pair learn
from the train part; each is judged on the test part, once, at all its settings. A line is the
non-decreasing convex hull of accuracy over the cost that the answers had; every hull may begin at
the cheapest model, so that pairs without it lose nothing. AIQ is its mean height from the cheapest
model's cost to the dearest's. The pair that is best on the train part's held-out folds is compared
with all five on the same resamples of the test prompts. `unlabelled`: the router of five that never
saw a label of one model. `decision_ms`: processor time of a decision.

    OUTRIDER_DATA=... python -m benchmarks.routing.bench_tiers
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.routing.real_questions import data_folder
from benchmarks.routing.routerbench import SETS, write_labels
from benchmarks.routing.tiers_plot import draw
from benchmarks.shared.harness import (
    argument_parser,
    percentile,
    prepare,
    show_table,
    start,
    write_results,
)
from outrider.router.dataset import LabelledPrompts, read_labelled_prompts
from outrider.router.estimator import TrainConfig, train_router
from outrider.router.features import FloatRows
from outrider.router.frontier import average_quality
from outrider.router.ladder import LadderRows
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows
from outrider.router.tier_labels import TierTerms
from outrider.router.tier_policy import TierPolicy, TierWish

MODELS: Final = (
    "mistralai/mistral-7b-chat",
    "mistralai/mixtral-8x7b-chat",
    "zero-one-ai/Yi-34B-Chat",
    "gpt-3.5-turbo-1106",
    "gpt-4-1106-preview",
)
UNLABELLED: Final = "mistralai/mixtral-8x7b-chat"
_COST_SHARES: Final = (0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """A router's settings on some prompts."""

    scores: FloatRows
    """[num_settings, num_prompts]."""
    usd: FloatRows
    """[num_settings, num_prompts]."""

    @classmethod
    def of(cls, rows: LadderRows, thresholds: Sequence[float]) -> "Line":
        """Measure settings."""
        return cls(
            scores=np.stack([rows.answered(rows.scores, each) for each in thresholds]),
            usd=np.stack([rows.answered(rows.usd, each) for each in thresholds]),
        )

    def points(self, weights: FloatRows) -> list[tuple[float, float]]:
        """Return each setting's mean cost and accuracy of weighted prompts."""
        costs, heights = self.usd @ weights, self.scores @ weights
        return list(zip(costs.tolist(), heights.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """The models alone, on some prompts, by rising cost."""

    scores: FloatRows
    usd: FloatRows

    def aiq(self, line: Line, weights: FloatRows) -> float:
        """Return the mean height of a line's hull, begun at the cheapest model."""
        costs, first = self.usd @ weights, float(self.scores[0] @ weights)
        points = [*line.points(weights), (float(costs[0]), first)]
        return average_quality(points, float(costs[0]), float(costs[-1]))


def labels(folder: Path, part: str, models: Sequence[str]) -> LabelledPrompts:
    """Read the labels of some models; costs come from their columns."""
    with tempfile.TemporaryDirectory() as place:
        path = write_labels(folder, part, MODELS, Path(place) / f"{part}.jsonl")
        return read_labelled_prompts(path, [TierTerms(name=model) for model in models])


def without_labels(data: LabelledPrompts, model: str) -> LabelledPrompts:
    """Return the data as if a model had no labels."""
    assert data.tiers is not None
    scores = {name: column for name, column in data.tiers.scores.items() if name != model}
    tiers = data.tiers
    return data.for_tiers(
        type(tiers)(
            names=tiers.names, costs=tiers.costs, scores=scores, usd=tiers.usd, accuracies={}
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """A router, and its settings on its held-out folds and on the test prompts."""

    scorer: RouterScorer
    train: Line
    test: Line


def judged(train: LabelledPrompts, test: LabelledPrompts, seed: int) -> Judged:
    """Train a router and measure its settings."""
    trained = train_router(train, TrainConfig(seed=seed))
    scorer, own = trained.scorer, trained.rows.tiers
    found = stage_rows(scorer, test).tiers
    if scorer.calibration is None or own is None or found is None:
        raise SystemExit("the router has no tiers")
    thresholds = [point.threshold for point in scorer.calibration.points]
    return Judged(scorer=scorer, train=Line.of(own, thresholds), test=Line.of(found, thresholds))


def pool_of(data: LabelledPrompts) -> Pool:
    """Return the models alone."""
    if data.tiers is None:
        raise SystemExit("the labels have no tiers")
    return Pool(
        scores=np.stack(data.tiers.labelled),
        usd=np.stack([data.tiers.usd[name] for name in data.tiers.names]),
    )


def height(points: Sequence[tuple[float, float]], usd: float) -> float:
    """Return the best accuracy within a cost, mixing two settings where that is better."""
    costs, heights = (np.array(each) for each in zip(*sorted(points), strict=True))
    best = float(heights[costs <= usd].max(initial=0.0))
    for cost, accuracy in points:
        for dearer, higher in points:
            if cost <= usd < dearer:
                share = (usd - cost) / (dearer - cost)
                best = max(best, accuracy + share * (higher - accuracy))
    return best


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return mean and 95 % interval of a bootstrap."""
    low, middle, high = np.quantile(values, (0.025, 0.5, 0.975)).tolist()
    return {"low": low, "median": middle, "high": high}


def decision_ms(scorer: RouterScorer, prompts: Sequence[str]) -> dict[str, float]:
    """Return the processor time of one decision on each prompt."""
    policy, wish = TierPolicy.of(scorer), TierWish()
    times = []
    for prompt in (*prompts[:50], *prompts):
        began_s = time.thread_time()
        policy.route(prompt, wish)
        times.append(1e3 * (time.thread_time() - began_s))
    return {"p50": percentile(times[50:], 50), "p99": percentile(times[50:], 99)}


def measure(folder: Path, *, resamples: int, seed: int, models: Sequence[str]) -> dict[str, Any]:
    """Train all routers and compare them."""
    train, test = (labels(folder, part, models) for part in ("train", "test"))
    pools = pool_of(train), pool_of(test)
    every = [np.full(pool.scores.shape[1], 1.0 / pool.scores.shape[1]) for pool in pools]
    found = {"all": judged(train, test, seed)}
    for pair in combinations(models, 2):
        parts = [labels(folder, part, pair) for part in ("train", "test")]
        found[" + ".join(pair)] = judged(parts[0], parts[1], seed)
    pairs = [name for name in found if name != "all"]
    best_pair = max(pairs, key=lambda name: pools[0].aiq(found[name].train, every[0]))
    hindsight = max(pairs, key=lambda name: pools[1].aiq(found[name].test, every[1]))
    if UNLABELLED in models:
        found["unlabelled"] = judged(without_labels(train, UNLABELLED), test, seed)
    rng = np.random.default_rng(seed)
    gains = []
    for _ in range(resamples):
        counts = np.bincount(rng.integers(0, len(every[1]), len(every[1])), minlength=len(every[1]))
        weights = counts / counts.sum()
        gains.append(
            pools[1].aiq(found["all"].test, weights) - pools[1].aiq(found[best_pair].test, weights)
        )
    costs, accuracies = pools[1].usd @ every[1], pools[1].scores @ every[1]
    best = pools[1].scores.argmax(axis=0)
    lines = {name: one.test.points(every[1]) for name, one in found.items()}
    first = (float(costs[0]), float(accuracies[0]))
    return {
        "num_train": len(train.prompts),
        "num_test": len(test.prompts),
        "sets": SETS,
        "singles": {
            model: {"usd": cost, "accuracy": accuracy}
            for model, cost, accuracy in zip(
                models, costs.tolist(), accuracies.tolist(), strict=True
            )
        },
        "oracle": {
            "usd": float(pools[1].usd[best, np.arange(len(best))].mean()),
            "accuracy": float(pools[1].scores.max(axis=0).mean()),
        },
        "aiq": {name: pools[1].aiq(one.test, every[1]) for name, one in found.items()},
        "aiq_coin": float((accuracies[0] + accuracies[-1]) / 2),
        "best_pair": best_pair,
        "best_pair_in_hindsight": hindsight,
        "aiq_gain_over_best_pair": interval(gains),
        "accuracy_at_cost": {
            f"{share:.0%}": {
                name: height([*lines[name], first], share * float(costs[-1]))
                for name in ("all", best_pair, hindsight)
            }
            for share in _COST_SHARES
        },
        "lines": {
            name: [list(point) for point in lines[name]]
            for name in dict.fromkeys(("all", best_pair, hindsight, "unlabelled"))
            if name in lines
        },
        "decision_ms": decision_ms(found["all"].scorer, test.prompts),
    }


def show(results: Mapping[str, Any]) -> None:
    """Print what the lines are worth."""
    rows = [[name, f"{aiq:.4f}"] for name, aiq in sorted(results["aiq"].items())]
    show_table("AIQ on the test prompts", ["router of", "AIQ"], rows)
    rows = [
        [share, *(f"{accuracy:.3f}" for accuracy in found.values())]
        for share, found in results["accuracy_at_cost"].items()
    ]
    heads = list(next(iter(results["accuracy_at_cost"].values())))
    show_table("accuracy at a share of the dearest model's cost", ["cost", *heads], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="by rising cost")
    parser.add_argument("--resamples", type=int, default=1000)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    results = measure(
        data_folder(),
        resamples=arguments.resamples,
        seed=arguments.seed,
        models=arguments.models,
    )
    show(results)
    path = write_results("bench_tiers", arguments.variant or "routerbench", results, arguments)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    start(main)
