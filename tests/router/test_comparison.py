from dataclasses import replace

import numpy as np
import pytest

from outrider.router.calibration import ALWAYS_LARGE, StageRows, measure
from outrider.router.comparison import JudgedRouter, compare
from outrider.router.costs import TokenPrices
from tests.router.staged import staged_rows


def judged(rows: StageRows, threshold: float = 0.5) -> JudgedRouter:
    return JudgedRouter(rows=rows, point=measure(rows, threshold, (0.0, ALWAYS_LARGE)))


def test_a_router_is_not_inferior_to_itself() -> None:
    one = judged(staged_rows(300))
    found = compare(one, one, margin=0.0, num_resamples=50)
    assert (found.accuracy.value, found.accuracy.low, found.accuracy.high) == (0.0, 0.0, 0.0)
    assert found.is_not_inferior
    assert found.apgr is not None
    assert found.apgr.value == 0.0
    assert found.cost_usd is None


def test_a_router_that_sees_less_is_inferior_and_a_wide_margin_forgives_it() -> None:
    rows = staged_rows(1500)
    blind = judged(replace(rows, text=1.0 - rows.text, prompt=1.0 - rows.text, answer=None))
    found = compare(blind, judged(rows), margin=0.01, num_resamples=200)
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high < 0.0
    assert not found.is_not_inferior
    assert found.apgr is not None
    assert found.apgr.high < 0.0
    assert compare(blind, judged(rows), margin=1.0, num_resamples=200).is_not_inferior
    assert compare(judged(rows), blind, margin=0.0, num_resamples=200).is_not_inferior


def test_pairs_make_intervals_narrower_than_each_accuracy_alone() -> None:
    rows = staged_rows(800)
    found = compare(judged(rows, 0.5), judged(rows, 0.55), margin=0.01, num_resamples=200)
    alone = 2 * 1.96 * np.sqrt(rows.weak.var() / len(rows.weak))
    assert found.accuracy.high - found.accuracy.low < alone


def test_costs_are_compared_where_prices_are_known() -> None:
    rows = staged_rows(300)
    price = TokenPrices(prompt=1.0, cached_prompt=0.0, completion=2.0)
    dear = TokenPrices(prompt=10.0, cached_prompt=0.0, completion=20.0)
    found = compare(
        judged(rows, 0.9), judged(rows, 0.2), margin=0.01, num_resamples=50,
        prices={"small": price, "large": dear},
    )  # fmt: skip
    assert found.cost_usd is not None
    assert found.cost_usd.low > 0.0


def test_other_prompts_cannot_be_compared_and_no_gap_has_no_apgr() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        compare(judged(staged_rows(50)), judged(staged_rows(50, seed=1)), margin=0.0)
    rows = staged_rows(50)
    level = judged(replace(rows, strong=rows.weak))
    assert compare(level, level, margin=0.0, num_resamples=5).apgr is None
