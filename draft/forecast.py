"""Forecasts of trees on the device, by which the host decides before they grow.

A tree that grows on the host is weighed after every level by the probabilities that it has. Those
of a tree on the device are known when its step is over, and by then say what to expect of the next.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.draft.budget.budget import Floats, StepBudget
from outrider.kernels.tree_bounds import MAX_TREE_NODES

_WEIGHT: Final = 0.2
_FIRST_CHANCE: Final = 0.6
_MOST_RATIO: Final = 0.98


def _first_chain() -> Floats:
    return np.asarray(_FIRST_CHANCE ** np.arange(1.0, MAX_TREE_NODES))


@dataclass(slots=True)
class TreeForecast:
    """Running means over a sequence's trees, float64 [255]."""

    by_rank: Floats = field(default_factory=_first_chain)
    """The path probability of the likeliest guess, of the second and so on."""
    by_depth: Floats = field(default_factory=_first_chain)
    """The sum of the path probabilities at depth 1, 2 and so on: the number of tokens to expect
    there."""

    def copy(self) -> "TreeForecast":
        """Return the same numbers, to go on from."""
        return TreeForecast(self.by_rank.copy(), self.by_depth.copy())

    def observe(
        self, path_probs: Floats, depths: npt.NDArray[np.int64], *, num_levels: int
    ) -> None:
        """Learn from a tree: its guesses' path probabilities and depths, [num_guesses] each.

        `num_levels`: how deep the small model's guesses could be. What lies deeper than it was
        asked for goes on as the last levels did.
        """
        ranked = np.sort(path_probs)[::-1][: len(self.by_rank)]
        self.by_rank *= 1.0 - _WEIGHT
        self.by_rank[: len(ranked)] += _WEIGHT * ranked
        last = min(num_levels, len(self.by_depth))
        sums = np.bincount(depths, path_probs, minlength=last + 1)[1 : last + 1]
        self.by_depth[:last] += _WEIGHT * (sums - self.by_depth[:last])
        before = self.by_depth[last - 2] if last > 1 else 1.0
        ratio = min(self.by_depth[last - 1] / max(before, 1e-6), _MOST_RATIO)
        deeper = np.arange(1, len(self.by_depth) - last + 1)
        self.by_depth[last:] = self.by_depth[last - 1] * ratio**deeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Grower:
    """A sequence that grows a tree on the device; `max_depth`: how deep the small model may go."""

    forecast: TreeForecast
    urgency: float
    max_depth: int
    max_nodes: int


def num_levels(
    growers: SequenceOf[Grower],
    step: StepBudget | None,
    *,
    width: int,
    min_gain: float,
) -> int:
    """Count the passes behind the roots' that are worth their time, `width` nodes a tree each.

    `min_gain`: without a budget, a level is worth a pass where it should bring a sequence so many
    tokens. At most one level less than the deepest tree may have, and as many nodes as a draft
    view's masks can tell apart.
    """
    deepest = max((grower.max_depth for grower in growers), default=0)
    most = min(deepest - 1, (MAX_TREE_NODES - 1) // width)
    if most <= 0:
        return 0
    gains = np.stack([grower.forecast.by_depth[: most + 1] for grower in growers])
    depths = np.arange(1, most + 2)
    gains = gains * (depths <= np.array([[grower.max_depth] for grower in growers]))
    if step is None:
        return int((gains[:, 1:].max(0) >= min_gain).cumprod().sum())
    weights = np.array([grower.urgency for grower in growers])
    tokens = step.base_tokens + (weights @ gains).cumsum()  # [most + 1], behind 0, 1, … levels
    num_nodes = len(growers) * depths
    target_s = step.target_s(int(num_nodes[-1]))
    level_s = step.level_s(len(growers) * width)
    spent_s = step.spent_s + step.part_host_s
    step_s = spent_s + np.arange(most + 1) * level_s + target_s[num_nodes]
    rates = np.where(step_s <= step.longest_s, tokens / step_s, 0.0)
    return int(np.argmax(rates))


def share_nodes(
    growers: SequenceOf[Grower], host_probs: Floats, step: StepBudget | None
) -> tuple[int, float]:
    """Return the forest's number of nodes and the least weighted chance of a host's guess.

    `host_probs`: path probabilities of the guesses in trees on the host, weighted, descending. The
    nodes of a step are those that should bring most, wherever they are.
    """
    expected = [grower.forecast.by_rank[: grower.max_nodes] * grower.urgency for grower in growers]
    forest_probs = np.concatenate([*expected, np.empty(0)])
    if step is None:
        return len(forest_probs), 0.0
    weighted = np.concatenate([host_probs, forest_probs])
    weighted[::-1].sort()
    number, _, _ = step.num_nodes(weighted)
    floor = float(weighted[number - 1]) if number else np.inf
    # The draft passes are made by now: a tree has at least its best guess judged.
    least = sum(grower.max_nodes > 0 for grower in growers)
    return max(int((forest_probs >= floor).sum()), least), floor
