"""Administrators have engines keep prompts by name, and the requests of one tenant find them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from outrider.gateway.answering.jobs.named_prompts import NamedPrompts
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.cli import app
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.http.apis.named_prompts import PromptList, PromptReport
from outrider.gateway.tenancy.keys.keys import ANONYMOUS
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.answering import build_jobs
from outrider.gateway.wiring.application import build_app
from tests.engines import PAIR_FOLDER, make_engine, shipped_pair
from tests.gateway.answers import read_answer
from tests.gateway.conftest import parts_over, running, wait_for
from tests.gateway.engines.adapters.test_adapters import BOSS, AlwaysLarge
from tests.gateway.engines.fleet.replicas import all_up
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import World

RULES = "You are a careful clerk. " + "Rule one: count twice. " * 12
SYSTEM = {"role": "system", "content": RULES}
LONG = "Lorem ipsum dolor sit. " * 300


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(str(PAIR_FOLDER / "large"))


@pytest.fixture(scope="module")
def http(
    tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """A gateway over the shipped pair, whose caches hold more than its longest request."""
    engine = InProcessEngineClient(
        lambda _: make_engine(shipped_pair(), large_blocks=400, small_blocks=400)
    )
    tenancy = Tenancy(keys=World(tmp_path_factory.mktemp("keys")).parts)
    parts = parts_over(engine, tokenizer, router=AlwaysLarge(), tenancy=tenancy)
    with TestClient(build_app(parts)) as client:
        wait_for(lambda: client.get("/ready").status_code == 200, 60)
        yield client


def tenant(http: TestClient, **fields: Any) -> tuple[str, dict[str, str]]:
    """A new key's tenant, and the headers of its requests."""
    made = http.post("/admin/keys", json={"name": "all", **fields}, headers=BOSS).json()
    return made["team"] or made["id"], {"authorization": f"Bearer {made['key']}"}


def keep(http: TestClient, name: str = "rules", **fields: Any) -> Any:
    body = {"messages": [SYSTEM], "ttl_s": 60, **fields}
    return http.put(f"/admin/prompts/{name}", json=body, headers=BOSS)


def num_cached(http: TestClient, headers: dict[str, str], *messages: Any, **fields: Any) -> int:
    body = {"model": "large", "messages": messages, "max_tokens": 4, **fields}
    answer = http.post("/v1/chat/completions", json=body, headers=headers).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask(text: str = "What is 2 plus 3?") -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_requests_of_the_tenant_find_the_prompt_and_others_do_not(http: TestClient) -> None:
    own_id, own = tenant(http)
    _, other = tenant(http)
    kept = keep(http, tenant=own_id)
    assert kept.status_code == 200, kept.text
    report = read_answer(PromptReport, kept.content)
    assert (report.name, report.tenant) == ("rules", own_id)
    tokens = {each.tier: each.tokens for each in report.tiers}
    assert tokens["small"] == tokens["large"] > 100
    assert all(each.engines == 1 and 0 < each.expires_in_s <= 60 for each in report.tiers)
    assert num_cached(http, own, SYSTEM, ask()) == tokens["large"]
    assert num_cached(http, other, SYSTEM, ask()) == 0
    listed = read_answer(PromptList, http.get("/admin/prompts", headers=BOSS).content)
    assert [(each.name, each.tenant) for each in listed.data] == [("rules", own_id)]
    path = "/admin/prompts/rules"
    assert http.delete(path, headers=BOSS).status_code == 404  # the administrator's own
    assert http.delete(f"{path}?tenant={own_id}", headers=BOSS).status_code == 200
    assert http.get("/admin/prompts", headers=BOSS).json()["data"] == []


@pytest.mark.slow
def test_a_teams_prompt_is_found_by_all_of_its_keys(http: TestClient) -> None:
    team = http.post("/admin/teams", json={"name": "clerks"}, headers=BOSS).json()["id"]
    keys = [tenant(http, team="clerks")[1] for _ in range(2)]
    document = ask("The list: apples, pears, plums, nuts, figs, dates, limes. " * 4)
    kept = keep(http, "list", messages=[document], tenant=team, model="large")
    assert kept.status_code == 200, kept.text
    (tier,) = kept.json()["tiers"]
    both = ask(document["content"] + "\n\nHow many pears?")
    assert num_cached(http, keys[0], both) >= tier["tokens"]
    assert num_cached(http, keys[1], document) >= tier["tokens"]
    http.delete(f"/admin/prompts/list?tenant={team}", headers=BOSS)


@pytest.mark.slow
def test_tools_are_a_part_of_the_prompt(http: TestClient) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    plain, armed = (
        keep(http, "agent", model="large", **fields).json()["tiers"][0]["tokens"]
        for fields in ({}, {"tools": tools})
    )
    assert armed > plain
    http.delete("/admin/prompts/agent", headers=BOSS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"messages": [ask(LONG)]}, 400, "keeps at most 1600 tokens of named prompts"),
        ({"messages": [ask("Hi")]}, 400, "whole blocks of 16 tokens"),
        ({"messages": []}, 400, "messages"),
        ({"ttl_s": 0}, 400, "ttl_s"),
        ({"temperature": 1}, 400, "temperature"),
        ({"tenant": "nobody"}, 404, "no key 'nobody'"),
        ({"model": "unknown"}, 404, "available: auto, small, large"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_words(
    http: TestClient, fields: dict[str, Any], status: int, said: str
) -> None:
    refused = keep(http, **fields)
    assert refused.status_code == status, refused.text
    assert said in refused.json()["error"]["message"]
    assert http.get("/admin/prompts", headers=BOSS).json()["data"] == []


@pytest.mark.slow
def test_only_administrators_keep_prompts_and_names_are_plain(http: TestClient) -> None:
    _, own = tenant(http)
    path, body = "/admin/prompts/rules", {"messages": [SYSTEM]}
    assert http.put(path, json=body, headers=own).status_code == 403
    assert http.get("/admin/prompts", headers=own).status_code == 403
    assert http.delete(path, headers=own).status_code == 403
    assert http.put(path, json=body).status_code == 401
    assert keep(http, "a%20b").status_code == 400
    assert keep(http, "a" * 65).status_code == 400


# ---- without keys, and the command --------------------------------------------------------------


def scripted(**options: Any) -> ScriptedClient:
    return ScriptedClient(vocab_size=2048, script=lambda _: Script(steps=[]), **options)


def warm(url: str, *arguments: object) -> Any:
    return CliRunner().invoke(app, ["cache", "warm", "--url", url, *map(str, arguments)])


def test_the_command_keeps_text_and_chats_where_no_key_exists(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    engine = scripted()
    (tmp_path / "rules.txt").write_text(RULES)
    chat = {"messages": [SYSTEM, ask()], "model": "small", "temperature": 0.5}
    (tmp_path / "agent.json").write_text(json.dumps(chat))
    with running(build_app(parts_over(engine, tokenizer))) as url:
        done = warm(f"{url}/v1", tmp_path / "rules.txt", "--ttl", "2m")
        assert done.exit_code == 0, done.output
        assert "rules: 128 tokens in the small model's cache, for 120 s" in done.output
        done = warm(url, tmp_path / "agent.json", "--name", "long")
        assert "long: 144 tokens in the small" in done.output
        refused = warm(url, tmp_path / "rules.txt", "--name", "no name")
        assert (refused.exit_code, "letters, digits" in refused.output) == (1, True)
    assert [(each.pin.name, each.tier) for each in engine.pinned if each.pin] == [
        ("rules", "small"),
        ("rules", "large"),
        ("long", "small"),
    ]
    assert all(each.sampling.max_tokens == 0 for each in engine.pinned)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "said"),
    [
        ("a.json", "{}", (), "no JSON object"),
        ("a.txt", " ", (), "is empty"),
        ("a.txt", "rules", ("--ttl", "soon"), "--ttl soon: write it as"),
        ("missing", None, (), "cannot be read"),
    ],
)
def test_the_command_names_what_is_wrong(
    name: str, content: str | None, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    done = warm("http://127.0.0.1:9", tmp_path / name, *arguments)
    assert (done.exit_code, said in done.output.replace("\n", "")) == (2, True), done.output


# ---- several engines ----------------------------------------------------------------------------


def test_every_engine_keeps_it_also_one_that_comes_later(tokenizer: ChatTokenizer) -> None:
    first, second, late = scripted(), scripted(tiers=("large",)), scripted(tiers=("large",))

    async def play() -> None:
        pool = EnginePool([EngineReplica("a", first), EngineReplica("b", second)])
        prompts = NamedPrompts(jobs=build_jobs(parts_over(pool, tokenizer)))
        await pool.start()
        await all_up(pool)
        chat = ChatRequest.model_validate({"messages": [SYSTEM], "model": "large"})
        await prompts.keep("rules", chat, 60.0, ANONYMOUS)
        assert len(await prompts.kept()) == 2
        await prompts.look()
        assert [len(each.pinned) for each in (first, second)] == [1, 1]
        pool.add(EngineReplica("c", late))
        await all_up(pool)
        await prompts.look()
        assert len(late.pinned) == 1
        assert late.pinned[0].prompt_token_ids == first.pinned[0].prompt_token_ids
        await prompts.delete("rules", ANONYMOUS.tenant)
        assert await prompts.kept() == []
        await prompts.look()
        assert await prompts.kept() == []
        await pool.close()

    asyncio.run(play())
