"""Weights from attainment."""

import pytest

from outrider.gateway.contract.answers.outcomes import ArmRef
from outrider.gateway.experiments.allocation import next_weights
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.settings.experiment_rules import AllocationKind, AllocationRule
from tests.gateway.experiments.measuring import counted, outcome

_EVEN = {"a": 0.5, "b": 0.5}
_THOMPSON = AllocationRule(kind="thompson", min_share=0.05, min_requests=20)


def _totals(**late: tuple[int, int]) -> dict[str, ArmTotals]:
    """By arm: how many requests, and how many of them were late."""
    return counted(
        *(
            outcome(
                number,
                ttft_s=0.9 if number < num_late else 0.1,
                arms=(ArmRef(experiment="e", version=1, arm=arm, unit_bucket=number % 64),),
            )
            for arm, (num, num_late) in late.items()
            for number in range(num)
        )
    )


@pytest.mark.parametrize("kind", ["thompson", "track_and_stop"])
def test_weights_are_shares_within_their_bounds(kind: AllocationKind) -> None:
    rule = AllocationRule(kind=kind, min_share=0.2, min_requests=20)
    totals = _totals(a=(200, 100), b=(200, 10), c=(200, 150))
    weights = next_weights(rule, {"a": 1.0, "b": 1.0, "c": 1.0}, totals, is_independent=True)
    assert weights is not None
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) >= 0.2 - 1e-9
    assert weights["b"] == max(weights.values())


def test_a_min_share_that_is_too_much_for_so_many_arms_is_even() -> None:
    rule = AllocationRule(kind="thompson", min_share=0.5, min_requests=1)
    totals = _totals(a=(50, 0), b=(50, 50), c=(50, 50))
    weights = next_weights(rule, {"a": 0.8, "b": 0.1, "c": 0.1}, totals, is_independent=True)
    assert weights == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})


def test_the_same_totals_give_the_same_weights() -> None:
    totals = _totals(a=(60, 20), b=(60, 16))
    first = next_weights(_THOMPSON, {"a": 0.9, "b": 0.1}, totals, is_independent=True)
    assert first == next_weights(_THOMPSON, {"a": 0.9, "b": 0.1}, totals, is_independent=True)
    assert first is not None
    assert first["b"] > first["a"]


def test_nothing_changes_where_it_must_not() -> None:
    totals = _totals(a=(200, 100), b=(200, 10))
    assert next_weights(AllocationRule(), _EVEN, totals) is None
    assert next_weights(_THOMPSON, {"a": 1.0}, totals) is None
    assert next_weights(_THOMPSON, _EVEN, _totals(a=(200, 100), b=(19, 0))) is None
    assert next_weights(_THOMPSON, _EVEN, _totals(a=(200, 100))) is None
    settled = next_weights(_THOMPSON, _EVEN, totals, is_independent=True)
    assert settled is not None
    assert next_weights(_THOMPSON, settled, totals, is_independent=True) is None


def test_requests_of_units_that_are_alike_count_for_less() -> None:
    """Of 16 users who are always or never late, 8 requests each tell little more than one."""
    totals = counted(
        *(
            outcome(
                number,
                ttft_s=0.9 if number % 16 < num_late else 0.1,
                arms=(ArmRef(experiment="e", version=1, arm=arm, unit_bucket=number % 16),),
            )
            for arm, num_late in (("a", 8), ("b", 6))
            for number in range(128)
        )
    )
    skewed = {"a": 0.9, "b": 0.1}
    each = next_weights(_THOMPSON, skewed, totals, is_independent=True)
    by_unit = next_weights(_THOMPSON, skewed, totals)
    assert each is not None
    assert by_unit is not None
    assert 0.5 < by_unit["b"] < each["b"] - 0.1
