"""Administrators see each tier's health and prices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.shared.upstream_servers import free_port
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.model_cards import Pricing
from outrider.gateway.http.apis.tiers import TierList, TierReport
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from tests.databases import with_tables
from tests.gateway.answers import read_answer
from tests.gateway.engines.fleet.test_from_zero import ScriptedFleet, asleep, gateway
from tests.gateway.hybrid import CHAT, World, hybrid
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN
from tests.gateway.tenancy.keys.world import World as Keys

TOKEN = "9f86d081884c7d659a2feaa0c55ad015"
BOSS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def world(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    """Two local tiers, and `cloud`, which is not there."""
    database = with_tables(tmp_path_factory.mktemp("tiers") / "outrider.db")
    with hybrid(
        tokenizer,
        encode,
        clouds=(),
        tier={
            "url": f"http://127.0.0.1:{free_port()}/v1",
            "price": {"prompt": 2.5, "completion": 10},
        },
        routing={"prices": {"small": {"prompt": 0.1, "completion": 0.4}}},
        charges={"cloud": {"prompt": 3, "completion": 12}},
        database_url=database,
        keys={"admin_token": TOKEN},
    ) as made:
        yield made


def tiers(world: World) -> dict[str, TierReport]:
    answer = world.http.get("/admin/tiers", headers=BOSS)
    assert answer.status_code == 200, answer.text
    return {each.name: each for each in read_answer(TierList, answer.content).data}


def prices(prompt: str, completion: str) -> Pricing:
    return Pricing("USD", prompt, prompt, completion)


def test_models_prices_and_costs_are_told(world: World) -> None:
    found = tiers(world)
    assert list(found) == ["small", "large", "cloud"]
    assert [each.is_local for each in found.values()] == [True, True, False]
    assert [each.model for each in found.values()] == [
        "test/small-model",
        "test/large-model",
        "mock-model",
    ]
    small, large, cloud = found.values()
    assert small.pricing == small.cost == prices("0.0000001", "0.0000004")
    assert (large.pricing, large.cost) == (None, None)
    assert cloud.pricing == prices("0.000003", "0.000012")
    assert cloud.cost == prices("0.0000025", "0.00001")


def test_a_server_that_fails_and_an_engine_that_loads_are_told_with_the_reason(
    world: World,
) -> None:
    cloud = tiers(world)["cloud"]
    assert (cloud.is_available, cloud.reason) == (True, "")
    assert [(each.breaker, each.num_in_flight) for each in cloud.servers] == [("closed", 0)]
    for _ in range(5):
        assert world.http.post("/v1/chat/completions", json={**CHAT, "model": "cloud"}).is_error
    cloud = tiers(world)["cloud"]
    assert not cloud.is_available
    assert cloud.reason == "None of its servers takes requests."
    assert [each.breaker for each in cloud.servers] == ["open"]
    world.engine.is_ready = False
    small = tiers(world)["small"]
    assert not small.is_available
    assert "loading" in small.reason
    world.engine.is_ready = True
    assert tiers(world)["small"].is_available


def test_a_tier_whose_engines_sleep_takes_requests(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    engine = ScriptedClient(vocab_size=420, script=lambda _: Script())
    pool = asleep(ScriptedFleet(("small", "large")), engine)
    with gateway(pool, tokenizer, tenancy=Tenancy(keys=Keys(tmp_path).parts)) as http:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = http.get("/admin/tiers", headers=headers)
        found = read_answer(TierList, answer.content).data
    assert [(each.name, each.is_available) for each in found] == [("small", True), ("large", True)]


def test_they_are_for_administrators(world: World) -> None:
    assert world.http.get("/admin/tiers").status_code == 401
    key = world.http.post("/admin/keys", json={"name": "plain"}, headers=BOSS).json()["key"]
    headers = {"authorization": f"Bearer {key}"}
    assert world.http.get("/admin/tiers", headers=headers).status_code == 403
