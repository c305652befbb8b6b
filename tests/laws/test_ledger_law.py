"""The books say what was done and what was told, whatever clients, models and limits do meanwhile.

The gateways are real ones on the shipped pair, the clients speak HTTP. What the ledger's rows add
up to is what the engine has counted itself; a client is charged what it was told; what a
limit has counted is what was charged.
"""

import itertools
import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from outrider.draft.training.tasks.families import stream
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.router.policy import NO_CONSTRAINTS, Route, RouteConstraints
from outrider.router.watch import WatchPlan
from tests.gateway.watches import PlannedWatch
from tests.laws.accounts import (
    PATHS,
    Accounts,
    Ask,
    Told,
    Workload,
    accounts,
    booked,
    counted,
    put_all,
    until_equal,
)
from tests.laws.gateways import gateway

LIMIT: Final = 10_000_000
CASCADE: Final = {"routing.cascade": "always", "routing.hold_back_tokens": 4}
WORLDS: Final[dict[str, dict[str, Any]]] = {
    "cascade": CASCADE,
    "plain": {**CASCADE, "speculation.enabled": False},
    "mid_stream": {"routing.mid_stream": True, "routing.hold_back_tokens": 2},
    "few_blocks": {**CASCADE, "engine.num_blocks": 80, "engine.block_size": 4},
    "crowded": {**CASCADE, "engine.max_sequences": 3, "engine.max_waiting": 2},
}


@dataclass(frozen=True)
class Chance:
    """A router whose watches decide by chance."""

    rng: random.Random
    goes_on: bool

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """The small model under a watch, where that may be."""
        plan = WatchPlan(new_watch=self.watch, mid_stream=self.goes_on)
        watch = plan if constraints.may_watch else None
        return Route(tier="small", reason="chance", quality=0.4, watch=watch, is_own=True)

    def watch(self) -> PlannedWatch:
        """Escalates at once, later, or at the end; keeps the answer; gives up in mid-stream."""
        if self.goes_on and self.rng.random() < 0.7:
            return PlannedWatch("commit", at=1, continue_at=self.rng.choice((2, 4, 9)))
        at = self.rng.choice((0, 1, 2, 5, None))
        return PlannedWatch(self.rng.choice(("escalate", "commit")), at=at)


@pytest.mark.parametrize(
    ("world", "decides"),
    [
        pytest.param("cascade", "chance", marks=pytest.mark.slow),
        ("plain", "router"),
        ("mid_stream", "chance"),
        pytest.param("few_blocks", "router", marks=pytest.mark.slow),
        pytest.param("crowded", "chance", marks=pytest.mark.slow),
    ],
)
def test_the_ledger_is_the_engines_own_count(world: str, decides: str, tmp_path: Path) -> None:
    num_requests = 40 if world in ("plain", "mid_stream") else 80
    check_books(world, decides, tmp_path, seed=1, num_requests=num_requests)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("decides", ["router", "chance"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_ledger_is_the_engines_own_count_of_many(
    world: str, decides: str, seed: int, tmp_path: Path
) -> None:
    check_books(world, decides, tmp_path, seed=seed, num_requests=400)


def check_books(world: str, decides: str, folder: Path, *, seed: int, num_requests: int) -> None:
    """Random requests of three keys; then all sums."""
    rng = random.Random(seed)
    flags = WORLDS[world]
    policy = None
    if decides == "chance":
        policy = Chance(random.Random(seed), goes_on=world == "mid_stream")
    with accounts(folder, flags, policy=policy) as made:
        limits = LimitSpec(tokens_per_day=LIMIT, requests_per_day=10_000, concurrent_requests=50)
        small = LimitSpec(tokens_per_day=1500)
        keys = [
            made.new_key("free"),
            made.new_key("limited", limits),
            made.new_key("poor", small),
            made.new_key("member", team=limits),
        ]
        workload = Workload(rng, keys, several_share=0.7)
        told = put_all([made.url], [workload.next() for _ in range(num_requests)], num_clients=8)
        check_sums(made)
        check_charges(made, told)
        check_limits(made, keys)
        check_variety(made, world, decides, told)


def check_variety(made: Accounts, world: str, decides: str, told: list[Told]) -> None:
    """Or else the sums would say little of this world."""
    rows, stats = made.rows(), made.engine_stats()
    assert {row["outcome"] for row in rows} >= {"answered", "cancelled"}
    writers = defaultdict(set)
    for row in rows:
        if row["num_charged_tokens"]:
            writers[row["request_id"]].add(row["tier"])
    if decides == "chance" and world in ("cascade", "mid_stream"):
        assert any(len(tiers) == 2 for tiers in writers.values()), "no answer of two tiers"
    if world == "few_blocks":
        assert sum(tier.num_preemptions for tier in stats.tiers.values()) > 0
    if world == "crowded":
        assert any(row["failure"] == "queue_full" for row in rows)
    assert bool(stats.num_draft_tokens) == (world != "plain")
    assert any(one.has_left for one in told)


def check_sums(made: Accounts) -> None:
    """Rows against the engine's counters."""
    until_equal(lambda: (booked(made.rows()), counted(made.engine_stats())))


def check_charges(made: Accounts, told: list[Told]) -> None:
    """Rows against what clients were told."""
    charged: dict[str, int] = defaultdict(int)
    for row in made.rows():
        charged[row["client_request_id"]] += row["num_charged_tokens"]
        assert 0 <= row["num_discarded_tokens"] <= row["num_completion_tokens"]
        if row["outcome"] in ("failed", "refused", "escalated", "lost") or row["kind"] == "draft":
            assert row["num_charged_tokens"] == row["charge_nanos"] == 0, row
    for one in told:
        paid = charged[one.ask.request_id]
        if one.usage is not None and not one.has_left and not one.has_failed:
            assert paid == sum(one.usage), one
        elif one.status is not None and one.status != 200:
            assert paid == 0, one


def check_limits(made: Accounts, keys: list[str]) -> None:
    """Rows against what limits have counted."""
    for key in (keys[1], keys[3]):
        until_equal(lambda key=key: (made.remaining(key), LIMIT - num_charged(made, key)))
    assert num_charged(made, keys[2]) <= 1500


def num_charged(made: Accounts, key: str) -> int:
    """Tokens that a key pays for."""
    rows = made.rows()
    return sum(row["num_charged_tokens"] for row in rows if row["key_id"] == key[3:11])


# ---- and no answer is another one for it --------------------------------------------------------

_OPEN: Final = [
    task.prompt for task in itertools.islice(stream(9, "heldout", families=("reverse_word",)), 6)
]
OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0, "max_tokens": 16},
    {"temperature": 2.0, "seed": 11, "min_tokens": 8, "max_tokens": 12},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 3, "max_tokens": 20, "n": 2},
)


@pytest.mark.slow
def test_no_answer_depends_on_its_tenant(tmp_path: Path) -> None:
    """Limits, tenants, weights, priorities and salts: the text is what it is without any key."""
    documents = [
        {"model": model, "messages": [{"role": "user", "content": prompt}], **options}
        for model in ("small", "large")
        for prompt, options in itertools.product(_OPEN, OPTIONS)
    ]
    with gateway({"database_url": "none"}) as made:
        right = put_all([made.url], [anybody(document) for document in documents], num_clients=8)
    assert len({answer(one) for one in right}) > len(documents) / 3
    few = {"engine.num_blocks": 120, "engine.block_size": 4, "engine.max_sequences": 6}
    with accounts(tmp_path, few) as made:
        limits = LimitSpec(tokens_per_minute=1_000_000, usd_per_day=100.0)
        keys = [
            made.new_key("light", limits, weight=0.1),
            made.new_key("heavy", weight=9.0),
            made.new_key("member", team=limits),
        ]
        rng = random.Random(4)
        asks, expected = [], []
        for number in rng.sample(range(2 * len(documents)), 2 * len(documents)):
            one = right[number % len(documents)]
            body = {**one.ask.body, "service_tier": rng.choice(("priority", "default", "flex"))}
            ask = replace(one.ask, request_id=f"k-{number}", key=rng.choice(keys), body=body)
            asks.append(ask)
            expected.append(answer(one))
        told = put_all([made.url], asks, num_clients=16)
        assert [answer(one) for one in told] == expected
        assert sum(tier.num_preemptions for tier in made.engine_stats().tiers.values()) > 0
        check_sums(made)
        check_charges(made, told)


def anybody(document: dict[str, Any]) -> Ask:
    """Asked without a key."""
    return Ask(request_id="anybody", key="none", path=PATHS[0], body=document)


def answer(told: Told) -> str:
    """The text of all choices and why they ended."""
    assert told.status == 200, told.body
    choices = json.loads(told.body)["choices"]
    return "|".join(f"{c['message']['content']} ({c['finish_reason']})" for c in choices)
