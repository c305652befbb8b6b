"""Administrators see the engines behind a gateway, and drain a group of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.fleet.admin import ReplicaList
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from tests.engines import PAIR_FOLDER
from tests.gateway.answers import read_answer
from tests.gateway.conftest import wait_for
from tests.gateway.engines.adapters.test_adapters import BOSS, AlwaysLarge
from tests.gateway.engines.fleet.replicas import mortal
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import World


@pytest.fixture
def http(tmp_path: Path) -> Iterator[TestClient]:
    """A gateway over two engines of one group and one of another."""
    made = [mortal("x", numerics="one"), mortal("y", numerics="one"), mortal("z", numerics="two")]
    with _gateway(EnginePool(replica for replica, _ in made), tmp_path) as client:
        wait_for(lambda: all(each.is_up for each in _listed(client).data), 60)
        yield client


def _gateway(engine: EnginePool | ScriptedClient, folder: Path) -> TestClient:
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    parts = GatewayParts(
        engine=engine,
        tokenizers={"small": tokenizer, "large": tokenizer},
        router=AlwaysLarge(),
        tenancy=Tenancy(keys=World(folder).parts),
    )
    return TestClient(build_app(parts))


def _listed(http: TestClient) -> ReplicaList:
    answer = http.get("/admin/replicas", headers=BOSS)
    assert answer.status_code == 200, answer.text
    return read_answer(ReplicaList, answer.content)


def test_a_group_is_drained_and_readmitted(http: TestClient) -> None:
    groups = {each.name: each.group for each in _listed(http).data}
    assert groups["x"] == groups["y"] != groups["z"]
    old, new = {"group": groups["x"]}, {"group": groups["z"]}
    drained = http.post("/admin/replicas/drain", json=old, headers=BOSS)
    assert drained.status_code == 200, drained.text
    assert [each["name"] for each in drained.json()["data"]] == ["x", "y"]
    assert [each.is_draining for each in _listed(http).data] == [True, True, False]
    refused = http.post("/admin/replicas/drain", json=new, headers=BOSS)
    assert refused.status_code == 409
    assert "no replica of another group" in refused.json()["error"]["message"]
    assert http.post("/admin/replicas/readmit", json=old, headers=BOSS).status_code == 200
    assert not any(each.is_draining for each in _listed(http).data)


def test_what_is_no_group_or_not_allowed_is_refused(http: TestClient) -> None:
    path = "/admin/replicas/drain"
    assert http.post(path, json={"group": "unknown"}, headers=BOSS).status_code == 404
    assert http.post(path, json={"group": 3}, headers=BOSS).status_code == 400
    assert http.post(path, json={"group": "x", "more": 1}, headers=BOSS).status_code == 400
    key = http.post("/admin/keys", json={"name": "all"}, headers=BOSS).json()["key"]
    plain = {"authorization": f"Bearer {key}"}
    assert http.post(path, json={"group": "x"}, headers=plain).status_code == 403
    assert http.get("/admin/replicas", headers=plain).status_code == 403


def test_a_gateway_with_one_engine_has_no_replicas(tmp_path: Path) -> None:
    with _gateway(
        ScriptedClient(vocab_size=2048, script=lambda _: Script(steps=[])), tmp_path
    ) as client:
        assert client.get("/admin/replicas", headers=BOSS).status_code == 404
