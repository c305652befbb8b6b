"""Choose each row's experts from the router's scores."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The rule by which a model's router chooses experts and weighs their results."""

    num_chosen: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Softmax over all experts, sigmoid of each, or softmax over the chosen ones alone."""
    renormalise: bool = False
    """The chosen weights are made to sum to 1."""
    scale: float = 1.0
    """The factor of the weights."""
    num_groups: int = 1
    """A group's score is the sum of its two best experts (DeepSeek-V3, GLM-4.5)."""
    kept_groups: int = 1
    """Only experts of so many of the best groups may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The experts of n rows, the best first: experts [n, k] int64, weights [n, k] float32."""

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> Routed:
    """Choose `rule.num_chosen` experts for each row of logits [n, num_experts].

    `correction`: [num_experts] float32, added to the scores for the choice alone. Of equal scores
    the expert with the lower number comes first. A row's result does not depend on the other rows.
    """
    logits = logits.float()
    if rule.scores == "softmax_of_chosen":
        best, experts = _best(logits, rule.num_chosen)
        weights = torch.softmax(best, -1)
    else:
        scores = torch.softmax(logits, -1) if rule.scores == "softmax" else _sigmoid(logits)
        wanted = scores if correction is None else scores + correction
        if rule.kept_groups < rule.num_groups:
            wanted = _within_groups(wanted, rule)
        _, experts = _best(wanted, rule.num_chosen)
        weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routed(experts=experts, weights=weights if rule.scale == 1.0 else weights * rule.scale)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _sigmoid(logits: Tensor) -> Tensor:
    """Return sigmoid of each, from operations that round alike at every place of a tensor."""
    return torch.softmax(torch.stack((logits, torch.zeros_like(logits)), -1), -1)[..., 0]


def _within_groups(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Return the scores with -inf for experts outside the best groups. [n, num_experts]."""
    groups = scores.view(len(scores), rule.num_groups, scores.shape[1] // rule.num_groups)
    _, kept = _best(groups.topk(2, -1).values.sum(-1), rule.kept_groups)
    is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device)
    is_kept.scatter_(1, kept, True)
    return groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).view_as(scores)
