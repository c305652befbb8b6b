from itertools import combinations_with_replacement

import numpy as np
import pytest

from outrider.router.bands import ALWAYS_LARGE, PaidBands, cuts_below
from outrider.router.features import FloatRows

RNG = np.random.default_rng(5)
NUM_ROWS = 60
GAINS = RNG.uniform(-0.2, 0.9, NUM_ROWS)
TEXT = np.clip(np.round(1.0 - GAINS + RNG.normal(scale=0.2, size=NUM_ROWS), 1), 0.0, 1.0)
LAST = np.clip(1.0 - GAINS, 0.0, 1.0)
SMALL = RNG.uniform(0.1, 0.3, NUM_ROWS)
LARGE = RNG.uniform(1.2, 3.0, NUM_ROWS)


def bands(begun: FloatRows, *, copies: int = 400, labels: FloatRows = GAINS) -> PaidBands:
    """`copies` of the same prompts: enough for what is expected to be shown, where it is so."""
    text, last, gains, small, large, held, found = (
        np.tile(column, copies) for column in (TEXT, LAST, GAINS, SMALL, LARGE, begun, labels)
    )
    return PaidBands(text, last, gains=gains, labels=found, small=small, large=large, begun=held)


def cost_below(cut: float) -> float:
    """What the large model's answers below a cut of the text cost more than the small one's."""
    return float(((cut > TEXT) * (LARGE - SMALL)).sum())


def value(threshold: float, band: tuple[float, float], begun: FloatRows) -> float:
    low, high = band
    is_watched = (low <= TEXT) & (high > TEXT)
    is_large = (low > TEXT) | (is_watched & (threshold > LAST))
    cost = np.where(is_large, LARGE + is_watched * begun, SMALL)
    return float((is_large * GAINS - (1.0 - threshold) * cost).sum())


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("held", [0.0, 0.1, 0.6])
def test_a_paid_band_has_the_highest_expected_value(threshold: float, held: float) -> None:
    begun = np.full(NUM_ROWS, held)
    found = bands(begun).around(threshold)
    cuts = [*cuts_below(np.unique(TEXT)).tolist(), ALWAYS_LARGE]
    best = max(value(threshold, band, begun) for band in combinations_with_replacement(cuts, 2))
    assert value(threshold, found, begun) == pytest.approx(best)


def test_an_answer_is_begun_only_where_that_pays() -> None:
    low, high = bands(np.zeros(NUM_ROWS)).around(0.7)
    narrow_low, narrow_high = bands(np.full(NUM_ROWS, 0.4)).around(0.7)
    assert high - low > narrow_high - narrow_low
    never = bands(np.full(NUM_ROWS, 100.0)).around(0.7)
    assert never[0] == never[1]


def test_the_ends_watch_nothing() -> None:
    either = bands(np.full(NUM_ROWS, 0.1))
    assert either.around(0.0) == (0.0, 0.0)
    assert either.around(ALWAYS_LARGE) == (ALWAYS_LARGE, ALWAYS_LARGE)


def test_an_answer_is_begun_only_where_labels_show_that_it_pays() -> None:
    held = np.full(NUM_ROWS, 0.1)
    low, high = bands(held).around(0.7)
    assert low < high
    # The same prompts once: too few to tell.
    few_low, few_high = bands(held, copies=1).around(0.7)
    assert few_low == few_high
    # What the last stage expects is not what the labels say.
    wrong_low, wrong_high = bands(held, labels=-GAINS).around(0.7)
    assert wrong_low == wrong_high


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8])
def test_the_text_alone_costs_no_more_than_the_band_would(threshold: float) -> None:
    held = np.full(NUM_ROWS, 0.1)
    low, high = bands(held).around(threshold)
    is_watched = (low <= TEXT) & (high > TEXT)
    is_large = (low > TEXT) | (is_watched & (threshold > LAST))
    banded = float((is_large * (LARGE - SMALL + is_watched * held)).sum())
    cut, _ = bands(held, copies=1).around(threshold)
    cuts = [*cuts_below(np.unique(TEXT)).tolist(), ALWAYS_LARGE]
    assert cost_below(cut) <= banded
    assert cost_below(cuts[cuts.index(cut) + 1]) > banded
