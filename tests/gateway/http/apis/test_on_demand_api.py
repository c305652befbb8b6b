"""Models on demand through a whole gateway, with scripted processes before mock servers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from outrider.gateway.answering.reading.placement_policy import PlacementPolicy
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.cli import app
from outrider.gateway.http.apis.on_demand import OnDemandList, OnDemandReport
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.upstream import build_upstreams
from tests.engines import PAIR_FOLDER
from tests.gateway.answers import read_answer
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN
from tests.gateway.tenancy.keys.world import World as Keys
from tests.gateway.upstream.on_demand_world import PoolWorld, pool_world
from tests.gateway.waiting import wait_for

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}
CHAT = {"messages": [{"role": "user", "content": "How are you today?"}]}


@dataclass
class World:
    """A gateway with the models `first` and `second`, of which one finds room at a time."""

    url: str
    http: httpx.Client
    pool: PoolWorld
    servers: dict[str, MockThread]

    def chat(self, model: str, **fields: Any) -> httpx.Response:
        """Ask a model."""
        return self.http.post("/v1/chat/completions", json={**CHAT, "model": model, **fields})

    def states(self) -> dict[str, str | None]:
        """The states of GET /v1/models."""
        cards = self.http.get("/v1/models").json()["data"]
        return {card["id"]: card["outrider"][0].get("state") for card in cards}

    def reports(self) -> dict[str, OnDemandReport]:
        """What /admin/models says."""
        answer = self.http.get("/admin/models", headers=BOSS)
        return {each.name: each for each in read_answer(OnDemandList, answer.content).data}

    def post(self, name: str, action: str) -> httpx.Response:
        """Load or unload a model by hand."""
        return self.http.post(f"/admin/models/{name}/{action}", headers=BOSS)

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run `outrider models`; return its status and what it says."""
        result = CliRunner().invoke(
            app,
            ["models", *arguments, "--url", self.url, "--key", ADMIN_TOKEN],
            env={"COLUMNS": "200"},
        )
        return result.exit_code, result.output


@pytest.fixture
def world(tokenizer: ChatTokenizer, tmp_path: Path) -> Iterator[World]:
    on_demand = {"checkpoint": str(PAIR_FOLDER / "small"), "memory_gib": 2, "lora": "sql=/x"}
    settings = Settings.model_validate(
        {
            "tiers": {
                name: {"on_demand": on_demand, "max_retries": 0} for name in ("first", "second")
            },
            "aliases": {"either": {"models": ["first", "second"]}},
        }
    )
    pool = pool_world(memory_gib=3)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(mock_in_thread(MockScript(), name=name))
            for name in settings.tiers
        }
        pool.urls = {name: server.url for name, server in servers.items()}
        upstream = UpstreamParts(
            tiers=build_upstreams(settings, {}, lambda attempt: None, pool=pool.pool),
            pool=pool.pool,
            rules=PlacementPolicy.of(
                settings.handoff, tiers=tuple(settings.tiers), local=("small", "large")
            ),
        )
        keys = Keys(tmp_path)
        parts = parts_over(
            ScriptedClient(vocab_size=420, script=lambda _: Script()),
            tokenizer,
            upstream=upstream,
            aliases=settings.aliases,
            tenancy=Tenancy(keys=keys.parts, database=keys.database, audit=AuditLog(keys.database)),
        )
        url = stack.enter_context(running(build_app(parts)))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        yield World(url, http, pool, servers)


def test_a_request_starts_its_model_and_puts_the_other_out(world: World) -> None:
    assert world.states()["first"] == "unloaded"
    for name in ("first", "first", "second"):
        answer = world.chat(name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outrider"]["tier"] == name
    assert [process.name for process in world.pool.started] == ["first", "second"]
    states = world.states()
    assert (states["first"], states["second"]) == ("unloaded", "loaded")
    assert states["large"] is None
    sent = world.servers["first"].requests[0]
    assert sent.headers["authorization"].startswith("Bearer ")
    assert sent.document["model"] == "first"


def test_a_model_that_cannot_load_is_a_503_and_a_chain_goes_on(world: World) -> None:
    world.pool.error = "its weights are torn"
    answer = world.chat("first")
    assert answer.status_code == 503
    assert "The first tier cannot load its model: its weights are torn." in answer.text
    assert 8 <= float(answer.headers["retry-after"]) <= 10
    world.pool.error = ""
    answer = world.chat("either")
    assert answer.status_code == 200, answer.text
    assert answer.json()["outrider"]["tier"] == "second"


def test_an_adapter_of_the_model_is_asked_for_by_its_name(world: World) -> None:
    assert world.chat("second/sql").status_code == 200
    assert world.servers["second"].requests[0].document["model"] == "sql"


def test_models_are_loaded_and_unloaded_by_hand(world: World) -> None:
    answer = world.post("first", "load")
    report = read_answer(OnDemandReport, answer.content)
    assert (report.name, report.state, report.memory_bytes) == ("first", "loaded", 2 << 30)
    assert (report.num_in_flight, report.keep_alive_s) == (0, 300)
    assert world.reports()["second"].state == "unloaded"
    assert read_answer(OnDemandReport, world.post("first", "unload").content).state == "unloaded"
    assert world.pool.names == []
    entries = world.http.get("/admin/audit", headers=BOSS).json()["data"]
    assert [(each["action"], each["target"]) for each in entries] == [
        ("model.load", "model/first"),
        ("model.unload", "model/first"),
    ]


def test_a_wrong_name_and_a_model_that_fails_are_told_to_administrators(world: World) -> None:
    answer = world.post("third", "load")
    assert answer.status_code == 404
    assert "there are: first, second" in answer.text
    world.pool.error = "no such file"
    assert world.post("first", "load").status_code == 503
    report = world.reports()["first"]
    assert (report.state, report.reason) == ("failed", "no such file: /models/secret")
    assert world.http.get("/admin/models").status_code == 401


def test_a_model_that_answers_is_not_unloaded_by_hand(world: World) -> None:
    world.servers["first"].script = MockScript(gap_s=0.05)
    with world.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "model": "first", "stream": True}
    ) as response:
        assert response.status_code == 200
        assert world.post("first", "unload").status_code == 409
        assert world.pool.names == ["first"]
        assert response.read()


def test_the_commands_say_what_they_did(world: World) -> None:
    assert world.command("load", "first")[1].startswith("first is loaded; that took ")
    status, listed = world.command("ls")
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in listed.splitlines()}
    assert lines["first"][:4] == ["loaded", "2", "GiB", "0"]
    assert lines["second"] == ["unloaded", "2", "GiB", "0", "-", "-"]
    assert world.command("unload", "first") == (0, "first is not loaded any more\n")
    status, said = world.command("load", "third")
    assert status != 0
    assert "there are: first, second" in said
    assert world.command("load", "../keys")[0] != 0


def test_what_is_no_gateway_is_told_in_a_sentence() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # HTML with status 501
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = CliRunner().invoke(app, ["models", "ls", "--url", url])
    assert result.exit_code == 1
    assert "/admin/models answers with status 501, and not as a gateway does" in result.output


def test_requests_wait_in_the_places_of_their_keys_tenant(world: World) -> None:
    pool = world.pool.pool
    pool.settings = pool.settings.model_copy(update={"start_within_s": 60.0})
    world.pool.loads_at_once = False
    made = [world.http.post("/admin/keys", json={"name": n}, headers=BOSS) for n in ("a", "b")]
    many, few = ({"authorization": f"Bearer {each.json()['key']}"} for each in made)

    def ask(headers: dict[str, str]) -> httpx.Response:
        body = {**CHAT, "model": "first"}
        return world.http.post("/v1/chat/completions", json=body, headers=headers)

    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(ask, many) for _ in range(3)]
        wait_for(lambda: pool.waiting.total() == 3, 20)
        assert "3 requests wait for models" in ask(many).text
        waiting.append(threads.submit(ask, few))
        wait_for(lambda: sorted(pool.waiting.values()) == [1, 3], 20)
        world.pool.started[0].loaded.set()
        assert [each.result().status_code for each in waiting] == [200] * 4
