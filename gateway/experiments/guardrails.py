"""Limits that stop an arm by themselves, once it is sure that the arm exceeds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.gateway.experiments.statistics.binomial import share_interval
from outrider.gateway.experiments.statistics.clusters import latency_design_effect
from outrider.gateway.experiments.statistics.interval import Interval
from outrider.gateway.experiments.statistics.means import mean_interval
from outrider.gateway.experiments.statistics.quantiles import quantile_interval
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.settings.experiment_rules import GuardrailLimits, GuardrailName

_MS_PER_S: Final = 1000.0
_QUANTILE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """An arm that exceeds a limit. `interval` has the limit's unit and lies above it."""

    arm: str
    guardrail: GuardrailName
    limit: float
    interval: Interval

    @property
    def reason(self) -> str:
        """Return the reason in words."""
        return (
            f"{self.guardrail} is above {self.limit:g}: "
            f"{self.interval.estimate:.4g}, surely at least {self.interval.low:.4g}"
        )


def guardrail_intervals(
    totals: ArmTotals, limits: GuardrailLimits, *, num_arms: int, is_independent: bool
) -> dict[GuardrailName, Interval]:
    """Return the interval of each set guardrail's figure, in the limit's unit: always valid.

    The limits' alpha is divided among all guardrails and arms. `is_independent`: every request is a
    unit of its own.
    """
    names = limits.names
    alpha = limits.alpha / max(1, len(names) * num_arms)
    return {name: _interval(name, totals, alpha, is_independent=is_independent) for name in names}


def breaches(
    arms: Mapping[str, ArmTotals],
    limits: GuardrailLimits,
    *,
    num_arms: int,
    is_independent: bool = False,
) -> list[Breach]:
    """Return the arms that exceed a limit, with the first such limit of each.

    They may be computed any number of times: that an arm within all its limits is ever listed
    has a probability of `limits.alpha` at most, for all arms together. `num_arms` counts all
    arms of the experiment, stopped ones too.
    """
    found = []
    for arm, totals in arms.items():
        intervals = guardrail_intervals(
            totals, limits, num_arms=num_arms, is_independent=is_independent
        )
        for name, interval in intervals.items():
            limit = getattr(limits, name)
            if interval.is_above(limit):
                found.append(Breach(arm=arm, guardrail=name, limit=limit, interval=interval))
                break
    return found


def _interval(
    name: GuardrailName, totals: ArmTotals, alpha: float, *, is_independent: bool
) -> Interval:
    if name == "error_share":
        return share_interval(totals.metrics["failed"], alpha, is_independent=is_independent)
    if name == "cost_per_request_usd":
        return mean_interval(totals.metrics["cost_usd"], alpha, is_independent=is_independent)
    effect = 1.0 if is_independent else latency_design_effect(totals, "ttft_s", alpha)
    seconds = quantile_interval(totals.sketches["ttft_s"], _QUANTILE, alpha, design_effect=effect)
    return seconds.scaled(_MS_PER_S)
