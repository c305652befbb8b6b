"""Requests that prefer time, price or quality, between the machine's models and upstream tiers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.answering.jobs.preferences import between_models, between_outlooks
from outrider.gateway.contract.answers.responder import TierOutlook
from outrider.gateway.contract.schema.kinds import Prefer
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.router.costs import ConversationSize, prices_by_size
from outrider.router.preference import PreferringPolicy
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import TestPolicy
from tests.gateway.scripted_client import Script, ScriptedClient

Make = Callable[..., Any]
PRICED = {"price": {"prompt": 1.0, "completion": 2.0}, "max_retries": 1}
FREE = {"price": {"prompt": 0.0, "completion": 0.0}}


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    """Makes a gateway with a small model, and a cloud in the large one's part."""

    def made(quality: float | None = None, **sections: Any) -> Any:
        policy = PreferringPolicy(policy=TestPolicy(tier="large"), min_quality=quality)
        own = {"local": ("small",), "models": {"small": "x", "large": "none"}, "policy": policy}
        return open_world(**{**own, **sections})

    return made


def told(world: Any, **fields: Any) -> dict[str, Any]:
    response = world.chat(**fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-outrider-tier"] == response.json()["outrider"]["tier"]
    report: dict[str, Any] = response.json()["outrider"]
    return report


def prefer(word: str, **more: Any) -> dict[str, Any]:
    return {"outrider": {"prefer": word, **more}}


def test_the_cheaper_tier_answers_and_says_so(make: Make) -> None:
    with make(tier=PRICED) as world:
        assert told(world)["tier"] == "cloud"  # the router's own choice
        report = told(world, **prefer("price"))
        assert (report["tier"], report["reason"]) == (
            "small",
            "router: prefers price, small costs least",
        )
        assert told(world, **prefer("quality"))["tier"] == "cloud"
        assert told(world, **prefer("price", min_quality=0.9))["tier"] == "cloud"  # the policy's
        # The threshold is a decision of its own, and a name leaves nothing to choose.
        assert told(world, **prefer("price", threshold=0.5))["tier"] == "cloud"
        assert told(world, model="cloud", **prefer("price"))["tier"] == "cloud"
        route = world.http.post("/v1/route", json=ASK | prefer("price")).json()
        assert (route["tier"], route["reason"]) == ("small", report["reason"])


ASK = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}


def test_the_operators_quality_bounds_the_price(make: Make) -> None:
    with make(0.9, tier=PRICED) as world:
        assert told(world, **prefer("price"))["tier"] == "cloud"
        assert told(world, **prefer("price", min_quality=0.0))["tier"] == "small"


def test_the_tier_that_is_expected_first_answers(make: Make) -> None:
    with make(tier=PRICED) as world:
        assert told(world, **prefer("latency"))["tier"] == "small"  # nothing was measured
        assert world.stream().report["tier"] == "cloud"
        world.says("L", gap_s=0.5)
        told(world, **prefer("price"))
        report = told(world, **prefer("latency"))
        assert (report["tier"], report["hand_off"]) == ("cloud", "policy")
        assert report["reason"].startswith("router: prefers latency, large is expected to answer ")


def test_a_small_models_server_is_compared_too(make: Make) -> None:
    device = {"device": (MockScript(), PRICED | {"local": True})}
    places = {"local": (), "models": {"small": "none", "large": "none"}, "others": device}
    with make(tier=FREE, handoff={"small": "device"}, **places) as world:
        report = told(world, **prefer("price"))
        assert (report["tier"], report["hand_off"]) == ("cloud", "policy")
        assert told(world, **prefer("latency"))["tier"] == "device"


def test_the_request_wins_over_its_alias_its_key_and_the_setting(
    make: Make, tmp_path: Path
) -> None:
    database = {"database_url": f"sqlite:///{tmp_path}/keys.db", "keys": {"refresh_s": 0.02}}
    thrifty = {"models": ("auto",), "defaults": {"outrider": {"prefer": "price"}}}
    sections = database | {"aliases": {"thrifty": thrifty}, "routing": {"prefer": "price"}}
    with make(tier=PRICED, **sections) as world:
        store = world.context.tenancy.keys.store
        careful = store.create(KeyOrder(name="a", scopes=Scopes(prefer="quality")))
        open_key = store.create(KeyOrder(name="b", scopes=Scopes()))
        bound = store.create(KeyOrder(name="c", scopes=Scopes(tiers=frozenset({"cloud"}))))
        wait_for(lambda: world.http.get("/v1/models").status_code == 401)  # keys are known
        newest = {"authorization": f"Bearer {bound.text}"}
        wait_for(lambda: world.http.get("/v1/models", headers=newest).status_code == 200)

        def tier(key: Any, **fields: Any) -> str:
            headers = {"authorization": f"Bearer {key.text}"}
            return str(told(world, headers=headers, **fields)["tier"])

        assert tier(open_key) == "small"
        assert tier(careful) == "cloud"
        assert tier(careful, model="thrifty") == "small"
        assert tier(careful, **prefer("price")) == "small"
        assert tier(open_key, model="thrifty", **prefer("quality")) == "cloud"
        assert tier(bound, **prefer("price")) == "cloud"  # what a key may not use it cannot prefer


def test_another_word_is_refused_by_name(make: Make) -> None:
    with make(tier=PRICED) as world:
        error = world.chat(**prefer("speed"))
        assert (error.status_code, error.json()["error"]["param"]) == (400, "outrider.prefer")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": ASK["messages"], "max_tokens": 8}),
        ("/api/chat", {"messages": ASK["messages"], "stream": False}),
    ],
)
def test_the_other_apis_take_it_too(make: Make, path: str, body: dict[str, Any]) -> None:
    with make(tier=PRICED) as world:
        for word, tier in (("price", "small"), ("quality", "cloud")):
            answer = world.http.post(path, json={"model": "auto", **body, **prefer(word)})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-outrider-tier"] == tier
        refused = world.http.post(path, json={"model": "auto", **body, **prefer("speed")})
        assert refused.status_code == 400


def outlook(first_token_s: float | None = None, cost_usd: float | None = None) -> TierOutlook:
    return TierOutlook(first_token_s=first_token_s, cost_usd=cost_usd)


@pytest.mark.parametrize(
    ("by", "small", "large", "best"),
    [
        ("latency", outlook(0.5), outlook(0.2), "large"),
        ("latency", outlook(0.2), outlook(0.5), "small"),
        ("latency", outlook(0.5), outlook(None), "small"),
        ("latency", outlook(None), outlook(0.1), "small"),
        ("price", outlook(None, 0.2), outlook(None, 0.1), "large"),
        ("price", outlook(None, 0.2), outlook(None, None), "small"),
        ("price", outlook(None, None), outlook(None, 0.1), "small"),
    ],
)
def test_what_is_unknown_speaks_for_the_small_tier(
    by: Prefer, small: TierOutlook, large: TierOutlook, best: str
) -> None:
    assert between_outlooks(by, small, large).best == best


async def test_a_cached_conversation_is_answered_first_by_the_model_that_has_it() -> None:
    tiers = (await ScriptedClient(vocab_size=8, script=lambda _: Script()).info()).tiers
    prices = prices_by_size({tier: info.num_parameters for tier, info in tiers.items()})
    long = ConversationSize(
        num_prompt_tokens=100_000, num_cached_tokens=99_999, num_completion_tokens=1
    )
    assert between_models("latency", tiers, long, None, prices).best == "small"
    assert between_models("latency", tiers, long, "small", prices).best == "small"
    assert between_models("latency", tiers, long, "large", prices).best == "large"
    fresh = ConversationSize(num_prompt_tokens=9, num_cached_tokens=0, num_completion_tokens=9)
    assert between_models("price", tiers, fresh, None, prices).best == "small"
