from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.router.calibration import (
    CalibrationError,
    CalibrationTarget,
    Prices,
    calibrate,
    expected_costs,
    measure,
    request_costs,
)
from outrider.router.costs import TokenPrices
from outrider.router.dataset import LabelledPrompts
from outrider.router.features import prompt_features
from outrider.router.files import RouterFileError, read_files, write_files
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows
from outrider.router.worth import ExpectedTokens, Worth
from outrider.router.worth_fit import fit_rates, fit_worth
from tests.router.routers import SMALL, scorer_that_says

PRICES: Prices = {
    "small": TokenPrices(prompt=1.0, cached_prompt=0.0, completion=2.0),
    "large": TokenPrices(prompt=10.0, cached_prompt=0.0, completion=20.0),
}
QUALITY = CalibrationTarget(quality=0.98)


def priced_prompts(num_rows: int, seed: int = 0) -> LabelledPrompts:
    """Two kinds of prompts, equally often too hard for the small model; one is a long passage."""
    rng = np.random.default_rng(seed)
    is_long = rng.random(num_rows) < 0.3
    is_hard = rng.random(num_rows) < 0.5
    prompts = [
        f"{'Read this. ' + 'word ' * 400 if long else 'Say it.'} "
        f"{'Explain quantum chromodynamics' if hard else 'hello'} {number}"
        for number, (long, hard) in enumerate(zip(is_long, is_hard, strict=True))
    ]
    num_prompt = np.where(is_long, 410.0, 10.0)
    num_answer = np.where(is_long, 60.0, 8.0)
    return LabelledPrompts(
        prompts=prompts,
        weak=(~is_hard).astype(np.float64),
        strong=np.ones(num_rows),
        sha256="2" * 64,
        num_prompt_tokens=num_prompt,
        num_weak_tokens=num_answer,
        num_strong_tokens=num_answer,
        weak_s=0.01 + 0.0001 * num_prompt + 0.001 * num_answer,
        strong_s=0.02 + 0.001 * num_prompt + 0.01 * num_answer,
    )


@pytest.fixture(scope="module")
def data() -> LabelledPrompts:
    return priced_prompts(120)


@pytest.fixture(scope="module")
def worth(data: LabelledPrompts) -> Worth:
    return fit_worth(data, SMALL, "second", PRICES).worth


def tokens_of(worth: Worth, text: str) -> ExpectedTokens:
    return worth.tokens(prompt_features(text, SMALL), len(text))


def test_rates_are_found_and_none_is_negative() -> None:
    rng = np.random.default_rng(0)
    prompt, answer = rng.uniform(1, 500, 80), rng.uniform(1, 90, 80)
    found = fit_rates(prompt, answer, 0.5 + 0.001 * prompt + 0.02 * answer)
    assert (found.request, found.prompt_token, found.answer_token) == pytest.approx(
        (0.5, 0.001, 0.02)
    )
    shrinking = fit_rates(prompt, answer, 10.0 - 0.001 * prompt + 0.02 * answer)
    assert shrinking.prompt_token == 0.0
    assert shrinking.answer_token == pytest.approx(0.02, rel=0.2)


def test_lengths_are_predicted_better_than_by_the_usual_one(data: LabelledPrompts) -> None:
    errors = fit_worth(data, SMALL, "dollar", PRICES).errors
    assert errors.predicted < 0.3 * errors.usual


def test_expected_seconds_and_dollars_of_small_cascade_and_large(
    data: LabelledPrompts, worth: Worth
) -> None:
    known = worth.all_costs(tokens_of(worth, data.prompts[0]), hold_back_tokens=4)
    assert set(known) == {"second", "dollar"}
    assert data.strong_s is not None
    assert known["second"].large == pytest.approx(data.strong_s[0], rel=0.3)
    for costs in known.values():
        assert costs.begun < costs.small < costs.large < costs.cascade


def test_a_request_with_a_short_limit_costs_less(data: LabelledPrompts, worth: Worth) -> None:
    long = max(data.prompts, key=len)
    tokens = tokens_of(worth, long)
    assert tokens.at_most(2).large == 2
    assert worth.factor(tokens.at_most(2)) < worth.factor(tokens)


def test_dear_prompts_need_more_gain(data: LabelledPrompts, worth: Worth) -> None:
    short, long = min(data.prompts, key=len), max(data.prompts, key=len)
    assert worth.factor(tokens_of(worth, short)) < 2.0
    assert worth.factor(tokens_of(worth, long)) > 4.0


@pytest.mark.parametrize("text", ["", "x" * 100_000, "\udcff", "日本語で答えて"])
def test_any_prompt_has_a_cost(worth: Worth, text: str) -> None:
    assert np.isfinite(worth.factor(tokens_of(worth, text)))


@pytest.mark.parametrize("unit", ["second", "dollar"])
def test_a_router_that_weighs_costs_spends_less_for_the_same_quality(
    data: LabelledPrompts, unit: str
) -> None:
    scorer = scorer_that_says(0.5)
    rng = np.random.default_rng(1)
    assert data.strong is not None
    plain = replace(
        stage_rows(scorer, data),
        text=1.0 - (data.strong - data.weak) * 0.6 - rng.uniform(0.1, 0.3, len(data.prompts)),
    )
    plain = replace(plain, prompt=plain.text)
    fitted = fit_worth(data, SMALL, "second" if unit == "second" else "dollar", PRICES)
    weighed = fitted.weighed(plain)
    half = CalibrationTarget(max_cost_usd=0.0005, prices=PRICES)
    by_cost, by_share = calibrate(weighed, half).chosen, calibrate(plain, half).chosen
    assert by_cost.accuracy > by_share.accuracy + 0.05
    assert request_costs(weighed, by_cost, PRICES).mean() <= 0.0005
    cheapest = calibrate(weighed, QUALITY).chosen
    assert cheapest.relative_accuracy >= 0.98
    points = calibrate(weighed, QUALITY).points
    enough = [point for point in points if point.relative_accuracy >= 0.98]
    least = min(expected_costs(weighed, point).mean() for point in enough)
    assert expected_costs(weighed, cheapest).mean() == pytest.approx(least)


def test_a_weighing_router_survives_its_file(
    data: LabelledPrompts, worth: Worth, tmp_path: Path
) -> None:
    scorer = scorer_that_says(0.5)
    rows = fit_worth(data, SMALL, "second", None).weighed(stage_rows(scorer, data))
    saved = scorer.with_calibration(calibrate(rows, QUALITY), worth)
    saved.save(tmp_path)
    loaded = RouterScorer.load(tmp_path)
    assert loaded.worth is not None
    assert loaded.worth.model == worth.model
    again = stage_rows(loaded, data)
    chosen = saved.calibration.chosen if saved.calibration else None
    assert chosen is not None
    before = measure(stage_rows(saved, data), chosen.threshold, chosen.band)
    assert measure(again, chosen.threshold, chosen.band) == before


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ("costs", "incomplete"),
        ("unit", "no rates"),
        ("rate", "is not a cost"),
    ],
)
def test_a_damaged_cost_model_is_no_router(
    data: LabelledPrompts, worth: Worth, tmp_path: Path, cut: str, why: str
) -> None:
    scorer = replace(scorer_that_says(0.5), worth=worth)
    scorer.save(tmp_path)
    files = read_files(tmp_path)
    config = dict(files.config)
    if cut == "costs":
        config["costs"] = None
    elif cut == "unit":
        config["costs"] = {**config["costs"], "seconds": None}
    else:
        seconds = config["costs"]["seconds"]
        worse = {**seconds, "small": {**seconds["small"], "answer_token": -1.0}}
        config["costs"] = {**config["costs"], "seconds": worse}
    write_files(tmp_path, replace(files, config=config))
    with pytest.raises(RouterFileError, match=why):
        RouterScorer.load(tmp_path)


def test_what_the_data_lack_is_named(data: LabelledPrompts) -> None:
    with pytest.raises(CalibrationError, match="weak_tokens"):
        fit_worth(replace(data, num_weak_tokens=None), SMALL, "dollar", PRICES)
    with pytest.raises(CalibrationError, match="strong_s"):
        fit_worth(replace(data, strong_s=None), SMALL, "second", PRICES)
    with pytest.raises(CalibrationError, match="prices"):
        fit_worth(data, SMALL, "dollar", None)
    with pytest.raises(CalibrationError, match="20 prompts"):
        fit_worth(priced_prompts(10), SMALL, "dollar", PRICES)
    swapped: Prices = {"small": PRICES["large"], "large": PRICES["small"]}
    with pytest.raises(CalibrationError, match="no more dollars"):
        fit_worth(data, SMALL, "dollar", swapped)
