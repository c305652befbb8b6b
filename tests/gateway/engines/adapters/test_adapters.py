"""Adapters through the gateway: names, keys, the administrators' endpoints, a watched folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import BadRequestError, ConflictError, NotFoundError
from outrider.gateway.engines.adapters.admin import AdapterList, AdapterReport
from outrider.gateway.engines.adapters.registry import AdapterRegistry
from outrider.gateway.engines.adapters.watcher import AdapterWatcher
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.settings.adapters import AdapterSettings, NamedAdapter, parse_adapter
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.router.policy import Route, RouteConstraints
from tests.adapters import make_adapter
from tests.engines import PAIR_FOLDER, make_engine, shipped_pair
from tests.gateway.answers import read_answer
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}
TALK = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}], "temperature": 0}


class AlwaysLarge:
    """Routes every request to the large tier."""

    def route(self, text: str, constraints: RouteConstraints) -> Route:
        return Route(tier="large", reason="test: large")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the shipped large model, and one of another base."""
    folder = tmp_path_factory.mktemp("adapters")
    pair = shipped_pair()
    for seed, name in enumerate(("legal", "poetry")):
        make_adapter(folder / name, pair.large_reference, seed=seed, strength=1.0)
    make_adapter(folder / "little", pair.small_reference, seed=3, strength=1.0)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def http(world: World, folder: Path) -> Iterator[TestClient]:
    """A gateway over the shipped pair, with one adapter from its settings."""
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    parts = GatewayParts(
        engine=InProcessEngineClient(lambda _: make_engine(shipped_pair())),
        tokenizers={"small": tokenizer, "large": tokenizer},
        router=AlwaysLarge(),
        tenancy=Tenancy(keys=world.parts),
        adapters=AdapterSettings(lora=(f"legal={folder / 'legal'}",)),
    )
    with TestClient(build_app(parts)) as client:
        while client.get("/ready").status_code != 200:
            pass
        yield client


def answer(http: TestClient, key: str, model: str, **more: Any) -> dict[str, Any]:
    body = TALK | {"model": model, "max_tokens": 12, "ignore_eos": True} | more
    response = http.post(
        "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    document: dict[str, Any] = response.json()
    return document | {"status": response.status_code}


@pytest.fixture(scope="module")
def key(http: TestClient, world: World) -> str:
    return str(http.post("/admin/keys", json={"name": "all"}, headers=BOSS).json()["key"])


def test_a_request_names_an_adapter_as_its_model(http: TestClient, key: str) -> None:
    base, legal = answer(http, key, "large"), answer(http, key, "legal")
    assert (legal["status"], legal["model"]) == (200, "legal")
    text = [each["choices"][0]["message"]["content"] for each in (base, legal)]
    assert text[0] != text[1]
    listed = http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
    card = next(card for card in listed if card["id"] == "legal")
    assert [each["tier"] for each in card["outrider"]] == ["large"]
    metrics = http.get("/metrics", headers=BOSS).text
    assert 'outrider_adapter_requests_total{adapter="legal"}' in metrics
    assert 'outrider_adapters_resident{tier="large"}' in metrics


def test_administrators_load_list_and_unload(http: TestClient, key: str, folder: Path) -> None:
    assert answer(http, key, "poetry")["status"] == 404
    wanted = {"name": "poetry", "path": str(folder / "poetry")}
    loaded = http.post("/admin/adapters", json=wanted, headers=BOSS)
    assert loaded.status_code == 200, loaded.text
    report = read_answer(AdapterReport, loaded.content)
    assert (report.max_rank, report.tier, report.watched) == (8, "large", False)
    listed = read_answer(AdapterList, http.get("/admin/adapters", headers=BOSS).content)
    assert [(each.name, each.max_rank) for each in listed.data] == [("legal", 8), ("poetry", 8)]
    assert answer(http, key, "poetry")["status"] == 200
    assert http.delete("/admin/adapters/poetry", headers=BOSS).status_code == 200
    assert answer(http, key, "poetry")["status"] == 404
    assert http.delete("/admin/adapters/poetry", headers=BOSS).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"name": "x", "path": "/nowhere"}, 400, "adapter_config.json cannot be read"),
        ({"name": "x", "path": "/no\0where"}, 400, "adapter_config.json cannot be read"),
        ({"name": "x", "path": "~nosuchuser/x"}, 400, "adapter_config.json cannot be read"),
        ({"name": "x", "path": "~\0/x"}, 400, "adapter_config.json cannot be read"),
        ({"name": "large", "path": "/nowhere"}, 409, "name of a model"),
        ({"name": "a b", "path": "/nowhere"}, 400, "name"),
        ({"name": "x", "path": "LITTLE"}, 400, "belongs to another one"),
        ({"name": "x", "path": "/nowhere", "tier": "medium"}, 400, "tier"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    http: TestClient, folder: Path, body: dict[str, str], status: int, complaint: str
) -> None:
    path = body["path"].replace("LITTLE", str(folder / "little"))
    refused = http.post("/admin/adapters", json=body | {"path": path}, headers=BOSS)
    assert refused.status_code == status, refused.text
    assert complaint in refused.json()["error"]["message"]


def test_keys_without_the_admin_scope_manage_none(http: TestClient, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert http.get("/admin/adapters", headers=headers).status_code == 403
    assert http.delete("/admin/adapters/legal", headers=headers).status_code == 403
    body = {"name": "x", "path": "/"}
    assert http.post("/admin/adapters", json=body, headers=headers).status_code == 403


def test_a_key_may_be_restricted_to_an_adapter(http: TestClient, key: str) -> None:
    del key
    made = http.post("/admin/keys", json={"name": "one", "models": ["legal"]}, headers=BOSS)
    own = made.json()["key"]
    assert answer(http, own, "legal")["status"] == 200
    assert answer(http, own, "large")["status"] == 403
    listed = http.get("/v1/models", headers={"authorization": f"Bearer {own}"}).json()["data"]
    assert [card["id"] for card in listed] == ["legal"]


def test_a_routed_adapter_is_the_large_ones(http: TestClient, key: str, folder: Path) -> None:
    """`@auto`: the router decides between the small base and the large model with the adapter."""
    wanted = {"name": "either", "path": str(folder / "legal"), "tier": "auto"}
    assert http.post("/admin/adapters", json=wanted, headers=BOSS).status_code == 200
    routed = answer(http, key, "either")
    assert (routed["status"], routed["model"]) == (200, "either")
    own = answer(http, key, "legal")
    assert routed["choices"][0]["message"] == own["choices"][0]["message"]
    small = answer(http, key, "either", outrider={"tier": "small"})
    assert small["model"] != "either"
    base = answer(http, key, "small")
    assert small["choices"][0]["message"] == base["choices"][0]["message"]
    cascade = answer(http, key, "either", outrider={"quality": {"cascade": 0.0}})
    assert cascade["status"] == 200
    assert http.delete("/admin/adapters/either", headers=BOSS).status_code == 200


def test_files_that_are_gone_fail_new_requests_only(
    http: TestClient, key: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "poetry", tmp_path / "gone")
    wanted = {"name": "gone", "path": str(tmp_path / "gone")}
    assert http.post("/admin/adapters", json=wanted, headers=BOSS).status_code == 200
    shutil.rmtree(tmp_path / "gone")
    assert answer(http, key, "gone")["status"] == 200, "it is resident"
    assert http.post("/admin/adapters", json=wanted, headers=BOSS).status_code == 400
    assert answer(http, key, "gone")["status"] == 200, "a failed load changes nothing"
    assert http.delete("/admin/adapters/gone", headers=BOSS).status_code == 200


# ---- without a model ------------------------------------------------------------------------


def scripted() -> ScriptedClient:
    return ScriptedClient(vocab_size=420, script=lambda _: Script())


def write(folder: Path, content: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text(content)


async def test_a_watched_folder_is_followed(tmp_path: Path) -> None:
    engine = scripted()
    registry = AdapterRegistry(engine, taken={"cloud"})
    watcher = AdapterWatcher(registry, tmp_path, poll_s=1.0)

    def names() -> list[tuple[str, str]]:
        return [(entry.ref.name, entry.ref.tier) for entry in registry.entries()]

    async def look(times: int = 2) -> None:
        for _ in range(times):
            await watcher.look()

    stamp = registry.stamp
    await registry.load(NamedAdapter(name="own", folder=str(tmp_path), tier="large"))
    assert registry.stamp != stamp, "or cached answers would outlive a change"
    write(tmp_path / "one", "1")
    write(tmp_path / "two@small", "2")
    write(tmp_path / "cloud", "3")
    write(tmp_path / "a b", "4")
    (tmp_path / "empty").mkdir()
    await look(1)
    assert names() == [("own", "large")], "it may be being written"
    await look(1)
    assert names() == [("one", "large"), ("own", "large"), ("two", "small")]
    before = len(engine.prepared)
    await look()
    assert len(engine.prepared) == before, "nothing has changed"
    stamp = registry.stamp
    write(tmp_path / "one", "another")
    await look()
    assert registry.stamp != stamp
    assert len(engine.prepared) == before + 1
    shutil.rmtree(tmp_path / "one")
    await look(1)
    assert names() == [("own", "large"), ("two", "small")]
    engine.broken_adapters.add("three")
    write(tmp_path / "three", "5")
    await look(4)
    assert names() == [("own", "large"), ("two", "small")]
    assert [ref.name for ref in engine.prepared].count("three") == 1


async def test_names_that_are_taken_and_too_many(tmp_path: Path) -> None:
    registry = AdapterRegistry(scripted(), taken={"cloud"}, max_named=1)

    for name in ("cloud", "test/large-model"):
        with pytest.raises(ConflictError):
            await registry.load(NamedAdapter(name=name, folder="x", tier="large"))
    await registry.load(NamedAdapter(name="a", folder="x", tier="large"))
    await registry.load(NamedAdapter(name="a", folder="y", tier="small"))
    with pytest.raises(ConflictError, match="max_named"):
        await registry.load(NamedAdapter(name="b", folder="x", tier="large"))
    with pytest.raises(NotFoundError):
        registry.unload("b")


async def test_a_broken_adapter_keeps_the_old_one(tmp_path: Path) -> None:
    engine = scripted()
    registry = AdapterRegistry(engine)

    old = await registry.load(NamedAdapter(name="a", folder="x", tier="large"))
    engine.broken_adapters.add("a")
    with pytest.raises(BadRequestError, match="it is broken"):
        await registry.load(NamedAdapter(name="a", folder="y", tier="large"))
    assert registry.entries() == [old]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=./b", ("a", "./b", "large")),
        ("a=./b@small", ("a", "./b", "small")),
        ("a=./b@auto", ("a", "./b", "auto")),
        ("a=./x@y/b", ("a", "./x@y/b", "large")),
    ],
)
def test_flags_are_read(text: str, expected: tuple[str, str, str]) -> None:
    assert tuple(parse_adapter(text)) == expected


@pytest.mark.parametrize(
    ("lora", "complaint"),
    [
        (("a",), "name=folder"),
        (("a=",), "name=folder"),
        (("auto=x",), "cannot be an adapter's name"),
        (("a b=x",), "cannot be an adapter's name"),
        (("a=x", "a=y"), "twice"),
        (("cloud=x",), "choose another name"),
        (("a=x@small",), "no model here"),
    ],
)
def test_settings_that_cannot_be_are_explained(lora: tuple[str, ...], complaint: str) -> None:
    flags = {
        "adapters.lora": lora,
        "models.large": str(PAIR_FOLDER / "large"),
        "tiers.cloud.url": ("http://127.0.0.1:1/v1",),
    }
    with pytest.raises(SettingsError, match=complaint):
        load_settings(environ={}, flags=flags)
