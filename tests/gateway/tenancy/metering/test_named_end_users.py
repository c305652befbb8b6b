"""End users, as requests of every API name them: their limits, and their rows in the ledger."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.contract.errors.tree import RateLimitError
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from tests.gateway.conftest import OpenWorld
from tests.gateway.tenancy.limits.rigs import want
from tests.gateway.tenancy.metering.tenants import Books

ONE_EACH = LimitSpec(requests_per_day=100, end_user=LimitSpec(requests_per_day=1))
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def post(made: Books, path: str, **fields: Any) -> httpx.Response:
    return made.world.http.post(path, json={**CHAT, **fields})


def usage_by_end_user(made: Books, **parameters: str) -> dict[str, int]:
    report = made.world.http.get("/v1/usage", params={"by": "end_user", **parameters}).json()
    return {group["group"]: group["requests"] for group in report["data"]}


@pytest.mark.parametrize("model", ["auto", "cloud"])
def test_each_api_names_its_end_user(opened: OpenWorld, model: str) -> None:
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"user": "ann"}),
        ("/v1/chat/completions", {"user": "shared", "safety_identifier": "bob"}),
        ("/v1/messages", {"metadata": {"user_id": "cora"}}),
        ("/v1/chat/completions", {}),
    )
    with opened(limits=ONE_EACH) as made:
        for path, fields in asked:
            assert post(made, path, model=model, **fields).status_code == 200
            refused = post(made, path, model=model, **fields)
            assert refused.status_code == 429
            assert "The end user's limit requests_per_day is 1 request" in refused.text
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert refused.headers["x-should-retry"] == "false"
        responses = made.world.http.post(
            "/v1/responses", json={"model": model, "input": "Hi", "safety_identifier": "dora"}
        )
        assert responses.status_code == 200, responses.text
        made.rows(5)
        assert usage_by_end_user(made) == {"ann": 1, "bob": 1, "cora": 1, "dora": 1, "": 1}
        assert usage_by_end_user(made, end_user="bob") == {"bob": 1}


def test_money_of_an_end_user_is_reserved_and_settled(opened: OpenWorld) -> None:
    limits = LimitSpec(end_user=LimitSpec(usd_per_day=0.01))
    with opened(limits=limits) as made:
        dear = post(made, "/v1/chat/completions", user="ann", max_tokens=600)
        assert dear.status_code == 429
        assert "the end user's limit usd_per_day is $0.01: it can never be" in dear.text
        assert dear.json()["error"]["code"] == "insufficient_quota"
        answers = [post(made, "/v1/chat/completions", user="ann") for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        made.settle()
        limiter = made.world.context.tenancy.limiter
        registry = made.world.context.tenancy.keys.registry
        assert registry is not None
        entry = registry.find(made.key[3:11])
        assert entry is not None
        assert isinstance(limiter, MemoryLimiter)

        async def left() -> int:
            reservation = await limiter.reserve(entry.principal, want(requests=0))
            await reservation.count_for("ann")
            (state,) = reservation.states
            return state.remaining

        spent = sum(row["charge_nanos"] for row in made.rows(4))
        assert asyncio.run(left()) == 10**7 - spent
        assert {row["end_user"] for row in made.rows(4)} == {"ann"}


TOO_LONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/chat/completions", {"user": "x" * 257}, "user"),
    ("/v1/chat/completions", {"safety_identifier": "x" * 257}, "safety_identifier"),
    ("/v1/messages", {"metadata": {"user_id": "x" * 257}}, "metadata.user_id"),
    ("/v1/embeddings", {"user": "x" * 257, "input": "Hi"}, "user"),
)


@pytest.mark.parametrize("model", ["auto", "cloud"])
def test_an_id_that_is_too_long_is_refused(opened: OpenWorld, model: str) -> None:
    with opened(clouds=() if model == "auto" else (MockScript(),)) as made:
        for path, fields, param in TOO_LONG:
            if path == "/v1/embeddings" and model == "auto":
                continue  # it has no tier
            answer = post(made, path, **fields, model=model)
            assert answer.status_code == 400, answer.text
            assert param in answer.text
        assert post(made, TOO_LONG[0][0], user="\u00e9" * 256, model=model).status_code == 200


def test_a_hashed_id_is_found_and_kept_nowhere(opened: OpenWorld) -> None:
    ledger = {"flush_ms": 10, "batch_ms": 10, "end_users": "hashed"}
    with opened(limits=ONE_EACH, ledger=ledger) as made:
        assert post(made, "/v1/chat/completions", user="ann").status_code == 200
        assert post(made, "/v1/chat/completions", user="ann").status_code == 429
        (row,) = made.rows(1)
        hasher = made.world.context.tenancy.keys.hasher
        assert row["end_user"] == hasher.end_user_digest("ann") != "ann"
        assert len(row["end_user"]) == 32
        assert usage_by_end_user(made, end_user="ann") == {row["end_user"]: 1}


def test_control_characters_of_an_id_are_neither_kept_nor_a_way_out(opened: OpenWorld) -> None:
    with opened(limits=ONE_EACH, clouds=()) as made:
        statuses = [
            post(made, "/v1/chat/completions", user=f"a{odd}b").status_code
            for odd in ("\0", "\1", "\u202e", "c")
        ]
        assert statuses == [200, 429, 429, 200]
        assert [row["end_user"] for row in made.rows(2)] == ["a?b", "acb"]


# ---- a verified token's subject ------------------------------------------------------------------

KEY = Principal(key_id="k", name="k", tenant="t", limits=ONE_EACH)


def meter_of(principal: Principal, tenancy: Tenancy) -> RequestMeter:
    return RequestMeter(
        tenancy=tenancy,
        principal=principal,
        endpoint="chat",
        client_request_id="c",
        arrival_s=0.0,
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
    )


async def test_a_verified_end_user_cannot_name_another() -> None:
    tenancy = Tenancy(limiter=MemoryLimiter())
    ann = replace(KEY, end_user="ann")
    first = meter_of(ann, tenancy)
    await first.enter()
    await first.count_for("somebody else")
    assert first.end_user == "ann"
    again = meter_of(replace(ann, scopes=KEY.scopes), tenancy)
    with pytest.raises(RateLimitError, match="end user's limit"):
        await again.enter()
    bob = meter_of(replace(KEY, end_user="bob"), tenancy)
    await bob.enter()
    await bob.count_for("ann")
    assert bob.headers["x-ratelimit-remaining-requests"] == "0"
    key = await tenancy.limiter.reserve(KEY, want())
    assert [state.remaining for state in key.states] == [97]  # the refused one did not count
    await key.count_for("ann")  # a name that the key's request brings is another's


def test_what_is_stored_for_a_verified_end_user_is_no_others() -> None:
    ann, bob = (replace(KEY, end_user=name) for name in ("ann", "bob"))
    assert len({KEY.owner, ann.owner, bob.owner}) == 3
