"""Sums over the ledger, on every database, against sums that a person can check."""

import asyncio
import random
from typing import Any

import pytest

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import keys, teams
from outrider.gateway.tenancy.keys.amounts import PastUse
from outrider.gateway.tenancy.ledger.dimensions import Dimension
from outrider.gateway.tenancy.ledger.history import usage_history, used_each_day
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.queries import (
    Savings,
    UsageFilter,
    ids_of,
    names_of,
    savings,
    total_usage,
    usage_by,
)
from outrider.gateway.tenancy.ledger.timestamps import parse_time
from tests.gateway.tenancy.ledger.ledgers import NOON, row
from tests.gateway.tenancy.ledger.rows import DAY_S, PRICES, some_rows, store


def long_prompt_prices(*, above: int, dearer: int) -> PriceBook:
    """Prices of whole nano-dollars of an upstream tier that takes what is hard."""
    price = {"prompt": 1, "cached_prompt": 0.5, "completion": 4}
    longer = {"above": above, **{name: usd * dearer for name, usd in price.items()}}
    flags = {
        "tiers.cloud.url": "http://127.0.0.1:1/v1",
        "tiers.cloud.price": {**price, "long_prompts": [longer]},
    }
    return PriceBook.from_settings(load_settings(flags=flags, environ={}))


def groups(database: Database, by: Dimension, **wanted: Any) -> dict[str, tuple[int, ...]]:
    """Requests, attempts, prompt, charged tokens, cost, charge."""
    with database.read() as connection:
        found = usage_by(connection, by, UsageFilter(**wanted), limit=100)
    return {
        str(usage.group): (
            usage.requests,
            usage.attempts,
            usage.tokens["prompt"],
            usage.tokens["charged"],
            usage.cost_nanos,
            usage.charge_nanos,
        )
        for usage in found
    }


def test_sums_by_every_dimension(database: Database) -> None:
    store(database, some_rows())
    assert groups(database, "key") == {
        "one": (2, 4, 400, 230, 189_000, 220_000),
        "two": (2, 3, 300, 110, 1_023_000, 14_000),
    }
    assert groups(database, "team") == {
        "red": (2, 4, 400, 230, 189_000, 220_000),
        "": (2, 3, 300, 110, 1_023_000, 14_000),
    }
    assert groups(database, "tier") == {
        "large": (1, 1, 100, 120, 160_000, 200_000),
        "small": (4, 5, 500, 220, 53_000, 34_000),
        "cloud": (1, 1, 100, 0, 999_000, 0),
    }
    assert list(groups(database, "day")) == ["2026-09-21", "2026-09-22"]
    assert groups(database, "model")["auto"] == (1, 1, 100, 110, 14_000, 20_000)
    assert groups(database, "kind")["draft"] == (1, 1, 100, 0, 1_000, 0)
    assert groups(database, "outcome")["failed"] == (1, 1, 100, 0, 10_000, 0)


def test_filters(database: Database) -> None:
    store(database, some_rows())
    assert list(groups(database, "tier", key_ids=["one"])) == ["large", "small"]
    assert list(groups(database, "key", team_ids=["red"])) == ["one"]
    assert groups(database, "key", tier="cloud").keys() == {"two"}
    assert groups(database, "key", model="auto")["one"][1] == 1
    assert groups(database, "key", only_charged=True)["one"][1] == 2
    assert list(groups(database, "day", since_s=NOON + DAY_S)) == ["2026-09-22"]
    assert list(groups(database, "day", until_s=NOON + DAY_S)) == ["2026-09-21"]
    assert groups(database, "key", key_ids=["' OR 1=1 --"]) == {}
    with database.read() as connection:
        nothing = total_usage(connection, UsageFilter(key_ids=["nobody"]))
        everything = total_usage(connection, UsageFilter())
        first = usage_by(connection, "key", UsageFilter(), limit=1)
    assert (nothing.attempts, nothing.charge_nanos, nothing.cost_per_million) == (0, 0, None)
    assert (everything.requests, everything.attempts) == (4, 7)
    assert everything.cost_per_million == pytest.approx(1_212_000 / 770 / 1000)
    assert everything.cost_per_million_charged == pytest.approx(1_212_000 / 340 / 1000)
    assert [usage.group for usage in first] == ["one"]


def test_savings_price_each_answer_once_at_the_large_tier(database: Database) -> None:
    store(database, some_rows(), PRICES)
    with database.read() as connection:
        found = savings(connection, UsageFilter())
    # Prompts of 1, 3 (40 cached) and 6, texts of 10, 20 and 10 tokens; without the mirror's cost.
    always = 260 * 1_000 + 40 * 500 + 40 * 4_000
    assert found == Savings(tier="large", cost_nanos=213_000, always_nanos=always)
    assert found.saved_nanos == always - 213_000


def test_savings_are_those_of_each_request_by_itself(database: Database) -> None:
    """Sums of tokens do not tell which requests had the prices of long prompts."""
    rng = random.Random(5)
    books = [
        long_prompt_prices(above=200, dearer=3),
        long_prompt_prices(above=300, dearer=7),
        PRICES,  # of a time in which another tier was the strong one
    ]
    rows, always = [], 0
    for number in range(200):
        book = rng.choice(books)
        num_prompt = rng.choice((0, 50, 199, 200, 201, 299, 300, 301, 900))
        counts = {
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": rng.randint(0, num_prompt),
            "num_completion_tokens": rng.randint(0, 90),
        }
        rows.append(row(number, **counts, price_version=book.version, cost_nanos=number))
        always += book.money(book.strong_tier, **counts).cost_nanos
    for book in books:
        store(database, [], book)
    store(database, rows)
    with database.read() as connection:
        found = savings(connection, UsageFilter())
    assert found is not None
    assert (found.cost_nanos, found.always_nanos) == (sum(range(200)), always)


def test_a_continued_answers_prompt_counts_once(database: Database) -> None:
    version = {"price_version": PRICES.version}
    broken = row(1, **version, outcome="failed", num_completion_tokens=30, num_discarded_tokens=5)
    rest = row(2, **version, request_id=broken.request_id, kind="continuation",
               num_prompt_tokens=125, num_completion_tokens=50)  # fmt: skip
    loser = row(3, **version, request_id=broken.request_id, kind="hedge", outcome="lost")
    store(database, [broken, rest, loser], PRICES)
    with database.read() as connection:
        found = savings(connection, UsageFilter())
    assert found is not None
    assert found.always_nanos == 100 * 1_000 + (25 + 50) * 4_000


def test_savings_are_unknown_without_the_price_of_the_large_model(database: Database) -> None:
    free = PriceBook.free()
    store(database, [row(11, price_version=free.version), row(12, price_version="gone")], free)
    with database.read() as connection:
        assert savings(connection, UsageFilter()) is None
    store(database, some_rows(), PRICES)  # from then on it is
    with database.read() as connection:
        found = savings(connection, UsageFilter())
    assert found is not None
    assert found.always_nanos == 260 * 1_000 + 40 * 500 + 40 * 4_000


def test_keys_and_teams_have_names(database: Database) -> None:
    team = {"id": "red", "name": "Red", "limits": "{}", "weight": 1.0, "labels": "{}"}
    key = {"id": "one", "name": "app", "team_id": "red", "hash": "", "hashed_with": "",
           "is_admin": False, "limits": "{}", "weight": 1.0, "labels": "{}"}  # fmt: skip
    with database.write() as connection:
        connection.execute(teams.insert(), [{**team, "created_at": NOON}])
        connection.execute(keys.insert(), [{**key, "created_at": NOON}])
        connection.execute(keys.insert(), [{**key, "created_at": NOON, "id": "two"}])
    with database.read() as connection:
        assert names_of(connection, "key", ["one", "gone"]) == {"one": "app"}
        assert names_of(connection, "team", ["red", ""]) == {"red": "Red"}
        assert names_of(connection, "day", ["2026-01-01"]) == {}
        assert sorted(ids_of(connection, "key", "app")) == ["one", "two"]
        assert ids_of(connection, "key", "one") == ["one"]
        assert ids_of(connection, "team", "gone") == ["gone"]


def test_history_counts_what_was_charged(database: Database) -> None:
    month = NOON - 20 * DAY_S
    store(
        database,
        [
            row(1, key_id="k", ended_at=NOON - 0.2, charge_nanos=5),
            row(2, key_id="k", ended_at=NOON - 0.9, charge_nanos=6),
            row(3, key_id="k", ended_at=NOON - 0.9, request_id=row(2).request_id, charge_nanos=7),
            row(4, key_id="k", ended_at=NOON - 0.9, kind="draft", num_charged_tokens=0),
            row(5, key_id="k", ended_at=NOON - 3600, charge_nanos=8),
            row(6, key_id="k", ended_at=month, team_id="t", charge_nanos=9),
            row(7, key_id="k", ended_at=NOON - 40 * DAY_S, charge_nanos=10),
            row(8, key_id="other", tier="large", ended_at=NOON - 30, charge_nanos=11),
        ],
    )
    history = asyncio.run(usage_history(database, NOON))

    def used(at_s: float, requests: int, nanos: int, **who: Any) -> PastUse:
        facts: dict[str, Any] = {"key_id": "k", "team_id": None, "tier": "small"} | who
        tokens = who.pop("tokens", 110)
        facts["tokens"] = tokens
        return PastUse(at_s=int(at_s), requests=requests, usd_nanos=nanos, **facts)

    other = {"key_id": "other", "tier": "large"}
    midnight = NOON - DAY_S / 2
    assert list(history.minute) == [
        used(NOON - 30, 1, 11, **other),
        used(NOON - 1, 2, 18, tokens=330),
    ]
    first, *today = history.days
    assert first == used(midnight - 20 * DAY_S, 1, 9, team_id="t")
    assert {*today} == {used(midnight, 1, 11, **other), used(midnight, 3, 26, tokens=440)}
    assert history.end_user_days == ()
    with database.read() as connection:
        everything = used_each_day(connection, 0, 1e12)
    assert sum(part.usd_nanos for part in everything) == 56


def test_history_has_the_end_users_whom_limits_count(database: Database) -> None:
    limits = '{"end_user":{"usd_per_day":1.0}}'
    owned = {"weight": 1.0, "labels": "{}", "created_at": NOON}
    key = {"name": "app", "hash": "", "hashed_with": "", "is_admin": False, **owned}
    with database.write() as connection:
        connection.execute(teams.insert(), [{"id": "t", "name": "T", "limits": limits, **owned}])
        connection.execute(keys.insert(), [{"id": "k", "limits": limits, **key}])
        connection.execute(keys.insert(), [{"id": "free", "limits": "{}", **key}])
    yesterday_s, long_ago_s = NOON - DAY_S, NOON - 40 * DAY_S
    store(
        database,
        [
            row(1, key_id="k", end_user="ann", ended_at=NOON - 3600, charge_nanos=1),
            row(2, key_id="k", end_user="ann", ended_at=NOON - 3600, tier="large", charge_nanos=2),
            row(3, key_id="k", end_user="ann", ended_at=yesterday_s, charge_nanos=4),
            row(4, key_id="k", end_user="ann", ended_at=long_ago_s, charge_nanos=8),
            row(5, key_id="k", ended_at=yesterday_s, charge_nanos=16),
            row(6, key_id="free", end_user="bob", ended_at=yesterday_s, charge_nanos=32),
            row(7, key_id="other", team_id="t", end_user="bob", ended_at=NOON - 9, charge_nanos=64),
            row(8, key_id="jwt-0", team_id="t", end_user="bob", ended_at=NOON - 999),
        ],
    )
    history = asyncio.run(usage_history(database, NOON))
    midnight_s = int(NOON - DAY_S / 2)
    found = {(u.at_s, u.key_id, u.end_user, u.usd_nanos) for u in history.end_user_days}
    assert found == {
        (midnight_s, "k", "ann", 3),
        (midnight_s - DAY_S, "k", "ann", 4),
        (midnight_s - DAY_S, "k", "", 16),
        (midnight_s, "", "bob", 64),  # of its team: the key does not limit its end users
        (midnight_s, "jwt-0", "bob", 0),  # a verified one
    }
    assert [(u.key_id, u.end_user) for u in history.minute] == [("other", "bob")]
    assert sum(used.usd_nanos for used in history.days) == 1 + 2 + 4 + 16 + 32 + 64


def test_rows_of_a_clock_that_was_ahead_count_on_their_own_day(database: Database) -> None:
    """A wall clock an hour, a day or years ahead is set right, and the gateway started again."""
    ahead_s = (0.0, 30.0, 3600.0, DAY_S, 40 * DAY_S, 4000 * DAY_S)
    rows = [row(i, key_id="k", ended_at=NOON + s, charge_nanos=1) for i, s in enumerate(ahead_s)]
    store(database, rows)
    history = asyncio.run(usage_history(database, NOON))
    assert [sum(used.usd_nanos for used in part) for part in (
        history.minute, history.days
    )] == [2, 3]  # fmt: skip


def test_moments() -> None:
    assert parse_time("7d", NOON) == NOON - 7 * DAY_S
    assert parse_time("90m", NOON) == NOON - 5400
    assert parse_time("2w", NOON) == NOON - 14 * DAY_S
    assert parse_time("2026-09-21", NOON) == NOON - DAY_S / 2
    assert parse_time("2026-09-21T12:00:00Z", 0.0) == NOON
    assert parse_time("2026-09-21T12:00Z", 0.0) == NOON
    assert parse_time("2026-09-21 14:00:00+02:00", 0.0) == NOON
    assert parse_time("1790000000", 0.0) == 1.79e9
    for text in ("", "yesterday", "7", "-7d", "2026-13-01", "2026-09-21T25:00", "7d\n", "\uff19d",
                 "1e9", "9" * 12, "0000-01-01"):  # fmt: skip
        with pytest.raises(ValueError, match=r"is not a time|not exist|too far"):
            parse_time(text, NOON)
    with pytest.raises(ValueError, match="write 7d, 24h"):
        parse_time("tomorrow", NOON)
