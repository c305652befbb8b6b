"""What clients of other servers ask for: counts, /version, /ping, /load, paths without /v1."""

from importlib.metadata import version
from typing import Any

import anthropic
import httpx
import openai
import pytest

from outrider.engine.events import EngineStats, TierStats
from outrider.gateway.contract.schema.model_cards import NamedModel, NamedModels
from outrider.gateway.contract.schema.responses import Readiness, ServerLoad, Version
from outrider.gateway.http.apis.tokenize_schema import InputTokens, Tokenized
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld, Server

HI: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "Hi"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}


def test_an_input_has_the_tokens_that_the_engine_is_given(
    server: Server, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": "large",
        "instructions": "Be kind.",
        "input": [{"role": "user", "content": "Hello 漢字"}],
    }
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert not server.engine.submitted
    client.responses.create(**asked, max_output_tokens=4)
    (request,) = server.engine.submitted
    assert counted.input_tokens == len(request.prompt_token_ids)
    assert client.responses.input_tokens.count(**asked, tools=[TOOL]).input_tokens > (
        counted.input_tokens
    )


def test_all_fields_of_an_input_are_optional(http: httpx.Client) -> None:
    answer = http.post("/v1/responses/input_tokens", json={})
    assert read_answer(InputTokens, answer.content).input_tokens > 0
    wrong = http.post("/v1/responses/input_tokens", json={"tools": [{"type": "function"}]})
    assert wrong.json()["error"]["param"].startswith("tools.0")
    assert http.post("/v1/responses/input_tokens", json={"model": "gone"}).status_code == 404


def test_models_are_told_in_the_words_of_the_client(http: httpx.Client, server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        names = [model.id for model in claude.models.list()]
        assert claude.models.retrieve("small").display_name == "small"
    assert names == [card["id"] for card in http.get("/v1/models").json()["data"]]
    headers = {"anthropic-version": "2023-06-01"}
    page = read_answer(NamedModels, http.get("/v1/models", headers=headers).content)
    assert (page.first_id, page.last_id) == (names[0], names[-1])
    read_answer(NamedModel, http.get("/v1/models/small", headers=headers).content)


def test_a_base_url_without_v1_will_do(server: Server, http: httpx.Client) -> None:
    server.says("Hello there!")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**HI).choices[0].message.content == "Hello there!"
        assert client.responses.create(model="large", input="Hi").output_text == "Hello there!"
        assert "small" in [model.id for model in client.models.list()]
    told = read_answer(Tokenized, http.post("/tokenize", json={"prompt": "Hi"}).content)
    assert (told.count, told.max_model_len) == (len(told.tokens), 256)
    back = http.post("/detokenize", json={"tokens": list(told.tokens)})
    assert back.json()["prompt"] == "Hi"


def test_a_base_url_with_a_v1_too_many_will_do(server: Server) -> None:
    server.says("Hello there!")
    with anthropic.Anthropic(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as claude:
        (block,) = claude.messages.create(**HI, max_tokens=8).content
    assert block.type == "text"
    assert block.text == "Hello there!"


@pytest.mark.slow
def test_an_alias_is_its_target_for_keys_and_books(opened: OpenWorld) -> None:
    with opened() as books:
        asked = {**HI, "max_tokens": 4}
        http, url = books.world.http, books.world.url
        assert httpx.post(f"{url}/chat/completions", json=asked).status_code == 401
        assert http.post("/chat/completions", json=asked).status_code == 200
        (row,) = books.rows(1)
        assert row["endpoint"] == "chat"
        for path in ("/load", "/version", "/tokenize"):
            assert httpx.get(f"{url}{path}").status_code == 401
        assert httpx.get(f"{url}/ping").status_code == 200
        plain = {"authorization": f"Bearer {books.new_key('plain')}"}
        assert http.get("/load").status_code == 200
        assert httpx.get(f"{url}/load", headers=plain).status_code == 403


def test_version_and_ping(server: Server, http: httpx.Client) -> None:
    assert read_answer(Version, http.get("/version").content).version == version("outrider")
    for answer in (http.get("/ping"), http.post("/ping")):
        read_answer(Readiness, answer.content)
    server.engine.is_ready = False
    assert http.get("/ping").status_code == 503


def test_the_load_is_what_runs_and_waits(server: Server, http: httpx.Client) -> None:
    def load() -> int:
        return read_answer(ServerLoad, http.get("/load").content).server_load

    assert load() == 0
    small, large = TierStats(num_running=2, num_waiting=1), TierStats(num_running=3)
    server.engine.current = EngineStats(tiers={"small": small, "large": large})
    try:
        assert load() == 6
    finally:
        server.engine.current = EngineStats()
