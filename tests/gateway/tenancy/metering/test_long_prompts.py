"""Prices that rise with the prompt: what is reserved covers what is charged, at every length."""

import asyncio
from decimal import Decimal
from typing import Any, Final

from hypothesis import example, given
from hypothesis import strategies as st

from outrider.gateway.contract.errors.tree import BudgetError
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitSpec
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.metering.charging import priced
from outrider.gateway.tenancy.metering.reserved_usage import UsageEstimate, reserve_request
from outrider.gateway.tenancy.metering.rows import Entry, Tokens
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from tests.gateway.tenancy.limits.rigs import key

PRICE: Final = st.integers(0, 10**6).map(lambda micros: micros / 10**4)
LENGTHS: Final = st.lists(st.integers(1, 400), max_size=3, unique=True).map(sorted)
NAMES: Final = ("prompt", "cached_prompt", "completion")


@st.composite
def rising_prices(draw: st.DrawFn) -> dict[str, Any]:
    """Draw prices of which none falls with the length of the prompt."""
    lengths = draw(LENGTHS)
    columns = [sorted(draw(PRICE) for _ in range(len(lengths) + 1)) for _ in NAMES]
    base, *longer = (dict(zip(NAMES, row, strict=True)) for row in zip(*columns, strict=True))
    return {
        **base,
        "long_prompts": [
            {"above": above, **each} for above, each in zip(lengths, longer, strict=True)
        ],
    }


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a request whose answer breaks off at one tier and is continued by another."""
    most_prompt = draw(st.integers(0, 500))
    return {
        "most_prompt": most_prompt,
        "prompt": draw(st.integers(0, most_prompt)),
        "cached_share": draw(st.sampled_from((0, 0.3, 1))),
        "takes": draw(st.lists(st.integers(1, 150), min_size=1, max_size=5)),
        "rest": draw(st.integers(0, 80)),
        "max_tokens": draw(st.integers(1, 600)),
        "is_bounded": draw(st.booleans()),
    }


STEEP: Final = {
    **dict.fromkeys(NAMES, 1.0),
    "long_prompts": [{"above": 100, **dict.fromkeys(NAMES, 100.0)}],
}
FAR: Final = {
    "most_prompt": 101,
    "prompt": 101,
    "cached_share": 0,
    "takes": [150, 150],
    "rest": 0,
    "max_tokens": 600,
    "is_bounded": False,
}


def entry(tier: str, kind: Any, num_prompt: int, num_cached: int, charged: Tokens) -> Entry:
    row = LedgerRow(
        row_id=kind,
        request_id="r",
        ended_at=0.0,
        kind=kind,
        outcome="answered",
        tier=tier,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_completion_tokens=charged.num_completion,
    )
    return Entry(row=row, charged=charged)


def _price_of(price: dict[str, Any], num_prompt: int, num_completion: int) -> int:
    """Return nano-dollars of an answer's tokens behind such a prompt."""
    reached = [each for each in price["long_prompts"] if num_prompt > each["above"]]
    usd_per_million = Decimal(str([price, *reached][-1]["completion"]))
    return int(usd_per_million * num_completion * 1000)


@given(
    prices=st.tuples(rising_prices(), rising_prices()),
    request=requests(),
    budget_usd=st.sampled_from((0.0005, 0.01, 1000)),
)
@example(prices=(STEEP, STEEP), request=FAR, budget_usd=1000)
@example(prices=(STEEP, STEEP), request=FAR, budget_usd=0.02)
def test_what_is_reserved_covers_what_is_charged(
    prices: tuple[dict[str, Any], ...], request: dict[str, Any], budget_usd: float
) -> None:
    """Nothing has to be reserved or given away when the request is over, and no budget is passed.

    Of the rest of a broken answer the prompt was charged before, and decides on the price.
    """
    tiers = {"one": prices[0], "two": prices[1]}
    book = PriceBook.from_settings(
        Settings.model_validate(
            {
                "tiers": {
                    name: {"url": "http://127.0.0.1:1/v1", "price": price}
                    for name, price in tiers.items()
                }
            }
        )
    )

    async def main() -> None:
        tenancy = Tenancy(limiter=MemoryLimiter(), prices=book)
        principal = key(LimitSpec(usd_per_day=budget_usd))
        usage = await reserve_request(tenancy, principal, "chat")
        estimate = UsageEstimate(
            tiers=tuple(tiers),
            num_prompt_tokens=request["most_prompt"],
            num_choices=1,
            max_tokens=request["max_tokens"],
            is_bounded=request["is_bounded"],
            is_enforced_upstream=True,
        )
        try:
            allowance = await usage.admit(estimate)
        except BudgetError:
            return
        assert allowance is not None
        written = [await allowance.take(num) for num in request["takes"]]
        first, rest = sum(written[:-1]), written[-1]
        num_prompt = request["prompt"]
        num_cached = int(num_prompt * request["cached_share"])
        whole = Tokens(num_prompt=num_prompt, num_cached=num_cached, num_completion=first)
        entries = [
            entry("one", "answer", num_prompt, num_cached, whole),
            entry("two", "continuation", num_prompt, 0, Tokens(num_completion=rest)),
        ]
        rows = [priced(each, book) for each in entries]
        assert usage.capped(rows) == rows
        assert await usage.charge(rows, is_counted=True) == rows
        assert sum(row.charge_nanos for row in rows) <= budget_usd * NANOS_PER_USD
        assert rows[1].charge_nanos == _price_of(tiers["two"], num_prompt, rest)

    asyncio.run(main())
