import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.costs import (
    ConversationSize,
    RunningMean,
    TokenPrices,
    TypicalRequest,
    gain_factor,
    prices_by_size,
)

SMALL = TokenPrices(prompt=0.1, cached_prompt=0.05, completion=0.4)
LARGE = TokenPrices(prompt=1.0, cached_prompt=0.5, completion=4.0)
PRICES = {"small": SMALL, "large": LARGE}


def size(cached: float) -> ConversationSize:
    return ConversationSize(
        num_prompt_tokens=1000 + cached, num_cached_tokens=cached, num_completion_tokens=100
    )


def test_prices_are_for_a_million_tokens() -> None:
    cost = LARGE.cost_usd(
        num_prompt_tokens=1_000_000, num_cached_tokens=400_000, num_completion_tokens=250_000
    )
    assert cost == pytest.approx(0.6 + 0.2 + 1.0)


def test_the_formula_by_hand() -> None:
    # 2,000 prompt tokens of which 1,000 are cached: c_small = 240, c_large = 2400 micro-dollars.
    assert gain_factor("small", size(1000), PRICES) == pytest.approx((2160 + 50) / 2160)
    assert gain_factor("large", size(1000), PRICES) == pytest.approx((2160 - 500) / 2160)


@given(st.floats(0.0, 1e6), st.floats(1.0, 1e5))
def test_the_more_is_cached_the_more_a_conversation_stays(cached: float, more: float) -> None:
    assert gain_factor("small", size(0.0), PRICES) == 1.0
    assert gain_factor("small", size(cached + more), PRICES) >= 1.0
    assert 0.0 <= gain_factor("large", size(cached), PRICES) <= 1.0
    large = [gain_factor("large", size(tokens), PRICES) for tokens in (cached, cached + more)]
    assert large[1] <= large[0]


def test_by_size_a_cached_token_costs_nothing_and_long_conversations_stay_on_large() -> None:
    prices = prices_by_size({"small": 1, "large": 10})
    assert gain_factor("large", size(0.0), prices) == 1.0
    assert gain_factor("large", size(20_000.0), prices) == 0.0


def test_a_large_tier_that_is_not_dearer_is_no_matter() -> None:
    assert gain_factor("small", size(1000), {"small": LARGE, "large": SMALL}) == 1.0


def test_means_follow() -> None:
    mean = RunningMean(100.0, rate=0.5)
    mean.add(200.0)
    assert mean.value == 150.0
    typical = TypicalRequest()
    before = typical.cost_usd(LARGE)
    for _ in range(200):
        typical.num_completion_tokens.add(1000)
    assert typical.num_completion_tokens.value == pytest.approx(1000, rel=0.05)
    assert typical.cost_usd(LARGE) > before
