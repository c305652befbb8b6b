"""Sizes before the start: they are those that simulated experiments took (docs/experiments.md)."""

import math
from typing import Any

import pytest

from outrider.gateway.experiments.statistics.size import SizeQuestion, requests_needed

LOGNORMAL = math.sqrt(math.exp(0.49) - 1.0)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("control", "arm", "expected"),
    [(0.9, 0.95, (1100, 1900, 2600)), (0.8, 0.85, (2400, 4200, 5700)),
     (0.99, 0.98, (6600, 10_800, 16_100))],
)  # fmt: skip
def test_shares_take_what_full_simulations_took(
    control: float, arm: float, expected: tuple[int, ...]
) -> None:
    found = requests_needed(SizeQuestion(kind="share", control=control, arm=arm))
    for needed, wanted in zip(found.values(), expected, strict=True):
        assert needed == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize(("ratio", "expected"), [(1.1, (2100, 3800, 6100)), (1.5, (180, 260, 340))])
def test_means_take_what_full_simulations_took(ratio: float, expected: tuple[int, ...]) -> None:
    question = SizeQuestion(kind="mean", control=300.0, arm=300.0 * ratio, variation=LOGNORMAL)
    for needed, wanted in zip(requests_needed(question).values(), expected, strict=True):
        assert needed == pytest.approx(wanted, rel=0.25)


@pytest.mark.slow
def test_requests_that_are_alike_count_for_less() -> None:
    alone = SizeQuestion(kind="share", control=0.9, arm=0.95)
    alike = SizeQuestion(
        kind="share", control=0.9, arm=0.95, requests_per_unit=11.0, correlation=0.1
    )
    assert alike.design_effect == pytest.approx(2.0)
    one, two = requests_needed(alone), requests_needed(alike)
    assert two[0.8] == pytest.approx(2 * (one[0.8] or 0), abs=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"control": 0.9, "arm": 0.9}, "never told apart"),
        ({"control": 1.0, "arm": 0.9}, "between 0 and 1"),
        ({"kind": "mean", "control": 0.0, "arm": 0.9}, "above 0"),
        ({"control": 0.8, "arm": 0.9, "correlation": 2.0}, "correlation"),
        ({"control": 0.8, "arm": 0.9, "weight": 1.0}, "weight"),
    ],
)
def test_what_no_experiment_has_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SizeQuestion(**{"kind": "share", **changes})
