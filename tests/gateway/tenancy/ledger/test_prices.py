"""Prices are exact: the parts never exceed the whole, and what is reserved covers what is paid."""

import random
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.tenancy.ledger.prices import Money, PriceBook
from outrider.gateway.tenancy.ledger.row import row_ids
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import cost_usd

PRICE = st.decimals(min_value=0, max_value=1000, places=6).map(float)
COUNT = st.integers(min_value=0, max_value=10**7)


def book(**flags: object) -> PriceBook:
    return PriceBook.from_settings(settings(**flags))


def settings(**flags: object) -> Settings:
    return load_settings(
        flags={name.replace("__", "."): value for name, value in flags.items()}, environ={}
    )


def test_costs_match_a_calculation_by_hand() -> None:
    prices = book(
        routing__prices__large__prompt=2.5,
        routing__prices__large__cached_prompt=0.25,
        routing__prices__large__completion=10,
        charges__large__prompt=5,
        charges__large__completion=20,
    )
    money = prices.money(
        "large", num_prompt_tokens=1000, num_cached_tokens=400, num_completion_tokens=50
    )
    # 600 x 2500 + 400 x 250 + 50 x 10000 nano-dollars; cached is charged as the rest where unset.
    assert money == Money(cost_nanos=2_100_000, charge_nanos=6_000_000)
    assert prices.is_known("large")
    assert not prices.is_known("small")
    assert prices.charge_of("large").completion == 20


def test_without_a_charge_clients_pay_what_it_costs() -> None:
    prices = book(routing__prices__small__prompt=0.0375, routing__prices__small__completion=0.15)
    money = prices.money("small", num_prompt_tokens=3, num_completion_tokens=1)
    assert money == Money(cost_nanos=262, charge_nanos=262)  # 3 x 37.5 + 150, rounded down


def test_a_share_of_the_charges_leaves_the_costs() -> None:
    prices = book(
        routing__prices__large__prompt=2.5,
        routing__prices__large__completion=10,
        charges__large__prompt=5,
        charges__large__completion=20,
    )
    half = prices.charging(Decimal("0.5"))
    for share, charge in ((half, 3_500_000), (prices.charging(Decimal(0)), 0)):
        money = share.money("large", num_prompt_tokens=1000, num_completion_tokens=100)
        assert money == Money(cost_nanos=3_500_000, charge_nanos=charge)
    assert half.version != prices.version
    assert PriceBook.from_document(half.document).version == half.version
    assert prices.charging(Decimal(1)).version == prices.version


@given(prompt=PRICE, cached=PRICE, completion=PRICE, fresh=COUNT, hit=COUNT, written=COUNT)
def test_sums_are_exact_and_rounded_down_once(
    prompt: float, cached: float, completion: float, fresh: int, hit: int, written: int
) -> None:
    prices = book(
        routing__prices__small__prompt=prompt,
        routing__prices__small__cached_prompt=cached,
        routing__prices__small__completion=completion,
    )
    exact = sum(
        Fraction(str(price)) * count * 1000
        for price, count in ((prompt, fresh), (cached, hit), (completion, written))
    )
    money = prices.money(
        "small",
        num_prompt_tokens=fresh + hit,
        num_cached_tokens=hit,
        num_completion_tokens=written,
    )
    assert money.cost_nanos == exact.__floor__()


@given(
    price=st.tuples(PRICE, PRICE, PRICE),
    reserved=st.tuples(COUNT, COUNT),
    cuts=st.tuples(*[st.integers(0, 100)] * 3),
)
def test_parts_never_exceed_what_was_reserved_for_the_whole(
    price: tuple[float, float, float],
    reserved: tuple[int, int],
    cuts: tuple[int, int, int],
) -> None:
    names = ("prompt", "cached_prompt", "completion")
    prices = book(**{f"charges__small__{name}": p for name, p in zip(names, price, strict=True)})
    prompt, completion = reserved
    first = completion * cuts[0] // 100
    parts = (
        prices.money(
            "small",
            num_prompt_tokens=prompt,
            num_cached_tokens=prompt * cuts[1] // 100,
            num_completion_tokens=first,
        ),
        prices.money("small", num_prompt_tokens=0, num_completion_tokens=completion - first),
    )
    most = prices.most("small", num_prompt_tokens=prompt, num_completion_tokens=completion)
    assert sum(part.charge_nanos for part in parts) <= most.charge_nanos


@given(
    prices=st.lists(st.tuples(PRICE, PRICE, PRICE), min_size=3, max_size=3),
    lengths=st.tuples(COUNT, COUNT).map(lambda pair: (min(pair) + 1, max(pair) + 2)),
    whole=st.tuples(COUNT, COUNT),
    shares=st.tuples(*[st.integers(0, 100)] * 3),
)
@example(prices=[(1.0, 0.0, 1.0)] * 2 + [(2.0, 0.0, 9.0)], lengths=(5, 9), whole=(10, 3),
         shares=(100, 0, 50))  # fmt: skip
def test_what_is_reserved_for_a_long_prompt_covers_all_parts_of_shorter_ones(
    prices: list[tuple[float, float, float]],
    lengths: tuple[int, int],
    whole: tuple[int, int],
    shares: tuple[int, int, int],
) -> None:
    names = ("prompt", "cached_prompt", "completion")
    columns = [sorted(column) for column in zip(*prices, strict=True)]
    base, *longer = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    tables = [{"above": n, **price} for n, price in zip(lengths, longer, strict=True)]
    made = book(charges__small={**base, "long_prompts": tables})
    prompt, first = whole[0] * shares[0] // 100, whole[1] * shares[2] // 100
    parts = (
        made.money(
            "small",
            num_prompt_tokens=prompt,
            num_cached_tokens=prompt * shares[1] // 100,
            num_completion_tokens=first,
        ),
        made.money(
            "small",
            num_prompt_tokens=0,
            num_completion_tokens=whole[1] - first,
            of_prompt=prompt,
        ),
    )
    most = made.most("small", num_prompt_tokens=whole[0], num_completion_tokens=whole[1])
    assert sum(part.charge_nanos for part in parts) <= most.charge_nanos


LONG = {
    "tiers.cloud.url": "http://127.0.0.1:1/v1",
    "tiers.cloud.price.prompt": 1.25,
    "tiers.cloud.price.cached_prompt": 0.125,
    "tiers.cloud.price.completion": 10,
    "tiers.cloud.price.long_prompts": [
        {"above": 200_000, "prompt": 2.5, "cached_prompt": 0.25, "completion": 15}
    ],
}


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "nanos"),
    [
        (200_000, 0, 200_000 * 1250 + 7 * 10_000),
        (200_001, 0, 200_001 * 2500 + 7 * 15_000),
        (200_001, 200_001, 200_001 * 250 + 7 * 15_000),  # cached tokens are part of the length
    ],
)
def test_all_tokens_of_a_request_cost_more_behind_a_long_prompt(
    num_prompt: int, num_cached: int, nanos: int
) -> None:
    settings = load_settings(flags=LONG, environ={})
    for made in (
        PriceBook.from_settings(settings),
        PriceBook.from_document(PriceBook.from_settings(settings).document),
    ):
        money = made.money(
            "cloud",
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            num_completion_tokens=7,
        )
        assert money == Money(cost_nanos=nanos, charge_nanos=nanos)
        assert made.charge_of("cloud").long_prompts == settings.tiers["cloud"].price.long_prompts
    usage = UpstreamUsage(
        num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_completion_tokens=7
    )
    assert cost_usd(usage, settings.tiers["cloud"].price) == pytest.approx(nanos / 1e9)


def test_versions_are_of_the_prices_alone() -> None:
    one, same = (book(routing__prices__small__prompt=1, log_level=log) for log in ("INFO", "ERROR"))
    other = book(routing__prices__small__prompt=1.000001)
    assert one.version == same.version != other.version
    again = PriceBook.from_document(one.document)
    assert again.version == one.version
    tokens = {"num_prompt_tokens": 7, "num_completion_tokens": 9}
    assert again.money("small", **tokens) == one.money("small", **tokens)


def test_more_cached_than_there_is_counts_as_all() -> None:
    prices = book(routing__prices__small__prompt=1, routing__prices__small__cached_prompt=0)
    money = prices.money("small", num_prompt_tokens=5, num_cached_tokens=9, num_completion_tokens=0)
    assert money.cost_nanos == 0
    with pytest.raises(ValueError, match="negative"):
        prices.money("small", num_prompt_tokens=-1, num_completion_tokens=0)


def test_unknown_tiers_are_free_but_not_in_settings() -> None:
    assert PriceBook.free().money("x", num_prompt_tokens=5, num_completion_tokens=5) == Money(
        cost_nanos=0, charge_nanos=0
    )
    with pytest.raises(SettingsError, match=r"charges.lagre: unknown tier; available: .*large"):
        book(charges__lagre__prompt=1)
    with pytest.raises(SettingsError, match="inf"):
        book(charges__large__prompt=float("inf"))


def test_the_strong_tier_takes_hard_requests() -> None:
    cloud = {"tiers__cloud__url": "http://127.0.0.1:1/v1"}
    assert book().strong_tier == "large"
    assert book(**cloud).strong_tier == "cloud"  # no model is loaded that was not named
    assert book(**cloud, models__large="x/y").strong_tier == "large"
    assert book(**cloud, models__large="x/y", handoff__strong="cloud").strong_tier == "cloud"
    assert book(**cloud, models__large="none", models__small="x/y").strong_tier == "cloud"


def test_row_ids_are_unique_short_and_in_order() -> None:
    one, other = (row_ids(random.Random(seed), lambda: 1.79e9) for seed in (1, 2))
    drawn = [next(one) for _ in range(1000)]
    assert drawn == sorted(drawn)
    assert len({*drawn, *(next(other) for _ in range(1000))}) == 2000
    assert len(drawn[0]) <= 64
