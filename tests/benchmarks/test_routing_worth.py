from dataclasses import replace

import numpy as np
import pytest

from benchmarks.routing.routing_worth import (
    COST_GRID,
    Costs,
    Given,
    at_equal_cost,
    joined,
    measured_rates,
    with_modelled_seconds,
    within_one_point,
)
from benchmarks.shared.intervals import Interval
from outrider.router.calibration import StageRows
from outrider.router.dataset import LabelledPrompts
from outrider.router.worth import CostRates
from tests.benchmarks.routed_rows import PRICES, make_rows
from tests.router.routers import SMALL

RATES = {
    "small": CostRates(request=0.01, prompt_token=0.0001, answer_token=0.001),
    "large": CostRates(request=0.05, prompt_token=0.001, answer_token=0.01),
}


def rows_of_two_lengths(number: int = 240) -> StageRows:
    """A third of the prompts cost fifty times as much as the others."""
    is_long = np.arange(number) % 3 == 0
    return replace(
        make_rows(number, seed=4),
        num_prompt_tokens=np.where(is_long, 2000.0, 20.0),
        hold_back_tokens=4,
    )


def given_of(rows: StageRows) -> Given:
    assert rows.num_prompt_tokens is not None
    data = LabelledPrompts(
        prompts=[
            f"{'word ' * int(count / 5)}{number}"
            for number, count in enumerate(rows.num_prompt_tokens.tolist())
        ],
        weak=rows.weak,
        strong=rows.strong,
        sha256="",
        num_prompt_tokens=rows.num_prompt_tokens,
        num_weak_tokens=rows.num_weak_tokens,
        num_strong_tokens=rows.num_strong_tokens,
    )
    timed = with_modelled_seconds(data, rows, RATES)
    return Given(data=timed, rows=rows, whole=rows, features=SMALL, prices=PRICES)


@pytest.fixture(scope="module")
def given() -> Given:
    return given_of(rows_of_two_lengths())


def test_rates_are_found_again_from_the_prompts_that_were_timed(given: Given) -> None:
    places = np.arange(40)
    assert given.data.weak_s is not None
    assert given.data.strong_s is not None
    seconds = {"small": given.data.weak_s[places], "large": given.data.strong_s[places]}
    found = measured_rates(given.rows, places, seconds)
    for tier, rates in RATES.items():
        assert found[tier].prompt_token == pytest.approx(rates.prompt_token, rel=1e-6)
        assert found[tier].answer_token == pytest.approx(rates.answer_token, rel=1e-6)


def test_halves_are_judged_once_and_costs_come_from_the_other(given: Given) -> None:
    parts = Costs(given).halves(given.rows, "dollar")
    assert sorted(np.concatenate([part.places for part in parts])) == list(range(240))
    assert all(part.judged.large_cost is not None for part in parts)
    assert Costs(given).halves(given.rows, None)[0].judged.large_cost is None
    values = [part.places.astype(np.float64) for part in parts]
    assert joined(parts, values).tolist() == list(range(240))


@pytest.mark.slow
def test_counting_costs_is_cheaper_within_one_point(given: Given) -> None:
    found = within_one_point(given, Costs(given))
    assert set(found) == {"text", "16 held", "whole answers"}
    cascade = found["16 held"]
    assert set(cascade) == {"request", "token cost", "second"}
    assert cascade["token cost"].token_cost < cascade["request"].token_cost
    for one in cascade.values():
        assert 0.0 < one.seconds <= 1.1
        assert one.minus_large.low <= one.minus_large.estimate <= one.minus_large.high


@pytest.mark.slow
def test_at_equal_cost_the_cascade_is_compared_with_the_text(given: Given) -> None:
    found = at_equal_cost(given, Costs(given))
    for by_cost in found.values():
        assert list(by_cost) == [f"{cost:g}" for cost in COST_GRID]
        for entry in by_cost.values():
            difference = entry["16 held minus text"]
            assert isinstance(difference, Interval)
            assert isinstance(entry["16 held"], float)
            assert isinstance(entry["text"], float)
            assert difference.estimate == pytest.approx(entry["16 held"] - entry["text"])
    mean = np.mean([entry["16 held"] for entry in found["token cost"].values()])
    assert mean > np.mean([entry["16 held"] for entry in found["request"].values()])
