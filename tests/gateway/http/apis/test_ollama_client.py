"""The official ollama client against a real server on a real socket."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from outrider.engine.errors import QueueFullError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.apis.ollama.answers import (
    LoadedModels,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaError,
    OllamaModels,
    OllamaVersion,
    ShownModel,
)
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld, Server, scripted_server
from tests.gateway.scripted_client import Script

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
OSLO = 'Wait. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXT = "Hello there, how are you?"
MAX_CONTEXT = 1024


@pytest.fixture(scope="module")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    """With room for tools in a prompt."""
    with scripted_server(tokenizer, encode, max_context=MAX_CONTEXT) as server:
        yield server


@pytest.fixture
def llama(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_whole_chat(server: Server, llama: ollama.Client) -> None:
    server.says(TEXT, group=3)
    answer = llama.chat("auto", HELLO, options={"temperature": 0, "num_predict": 9, "stop": ["§"]})
    assert answer.message.content == TEXT
    (request,) = server.engine.submitted
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 9)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(request.prompt_token_ids)
    assert answer.eval_count == len(server.encode(TEXT))
    assert answer.total_duration
    assert answer.total_duration >= (answer.prompt_eval_duration or 0) > 0


def test_a_streamed_chat(server: Server, llama: ollama.Client) -> None:
    server.says(TEXT, group=2)
    parts = list(llama.chat("small:latest", HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert parts[-1].eval_count == len(server.encode(TEXT))


def test_requests_are_streams_unless_they_say_otherwise(server: Server, http: httpx.Client) -> None:
    server.says(TEXT)
    answer = http.post("/api/chat", json={"model": "auto", "messages": HELLO})
    *begun, last = lines(answer)
    for line in (*begun, last):
        read_answer(OllamaChatAnswer, json.dumps(line).encode())
    assert last["done_reason"] == "stop"
    assert last["outrider"]["tier"] == answer.headers["x-outrider-tier"] == "small"
    prompted = lines(http.post("/api/generate", json={"model": "auto", "prompt": "Hello"}))
    for line in prompted:
        read_answer(OllamaAnswer, json.dumps(line).encode())
    assert "".join(line["response"] for line in prompted) == TEXT


def test_a_prompt_is_a_chat_and_a_raw_one_is_not(server: Server, llama: ollama.Client) -> None:
    server.says(TEXT)
    assert llama.generate("large", "Hello", system="Be kind.").response == TEXT
    assert llama.generate("large", "Hello", raw=True).response == TEXT
    parts = list(llama.generate("large", "Hello", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == TEXT
    llama.chat("large", [{"role": "system", "content": "Be kind."}, *HELLO])
    prompted, raw, _, chat = server.engine.submitted
    assert list(raw.prompt_token_ids) == server.encode("Hello")
    assert prompted.prompt_token_ids == chat.prompt_token_ids


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_loop(server: Server, llama: ollama.Client, is_streamed: bool) -> None:
    server.says(OSLO)
    asked: Any = llama.chat("auto", HELLO, tools=[WEATHER], stream=is_streamed)
    told = list(asked) if is_streamed else [asked]
    calls = [call for part in told for call in part.message.tool_calls or ()]
    (call,) = calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    assert "".join(part.message.content or "" for part in told).strip() == "Wait."
    server.says("It is raining.")
    called = {"role": "assistant", "content": "Wait.", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
    answer = llama.chat("auto", [*HELLO, called, result], tools=[WEATHER])
    assert answer.message.content == "It is raining."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thoughts(server: Server, llama: ollama.Client, is_streamed: bool) -> None:
    server.says("Let me see.</think>\nFine.")

    def asked(think: Any) -> tuple[str, str]:
        answer: Any = llama.chat("large", HELLO, think=think, stream=is_streamed)
        told = [part.message for part in (answer if is_streamed else [answer])]
        return "".join(m.thinking or "" for m in told), "".join(m.content or "" for m in told)

    assert asked(True) == ("Let me see.", "Fine.")
    assert asked("high") == ("Let me see.", "Fine.")
    assert asked(False)[0] == ""
    on, _, off = server.engine.submitted
    assert len(on.prompt_token_ids) > len(off.prompt_token_ids)


def test_formats_are_enforced(server: Server, llama: ollama.Client) -> None:
    server.says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        assert llama.chat("large", HELLO, format=form).message.content == '{"a": 1}'  # type: ignore[call-overload]
        assert llama.generate("large", "Hi", format=form).response == '{"a": 1}'  # type: ignore[call-overload]
        assert llama.generate("large", "Hi", format=form, raw=True).response  # type: ignore[call-overload]
    assert llama.generate("large", "Hi", format="").response
    *formal, plain = server.engine.submitted
    assert all(request.grammar is not None for request in formal)
    assert plain.grammar is None


def test_a_request_that_asks_nothing_looks_the_model_up(
    server: Server, llama: ollama.Client
) -> None:
    assert llama.generate("small").done_reason == "load"
    assert llama.chat("small", []).done_reason == "load"
    assert llama.generate("small", keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError) as unknown:
        llama.generate("gone")
    assert unknown.value.status_code == 404
    assert not server.engine.submitted


def test_what_changes_nothing_is_named(server: Server, http: httpx.Client) -> None:
    body = {
        "model": "auto",
        "prompt": "Hello",
        "stream": False,
        "context": [1, 2],
        "template": "{{ .Prompt }}",
        "keep_alive": "5m",
        "options": {"num_ctx": 4096, "num_thread": None, "repeat_penalty": 1.5},
    }
    answer = http.post("/api/generate", json=body)
    assert answer.status_code == 200
    assert set(answer.headers["x-outrider-ignored-fields"].split(", ")) == {
        *("context", "template", "keep_alive", "options.num_ctx")
    }
    (request,) = server.engine.submitted
    assert request.sampling.repetition_penalty == 1.5


def test_models(server: Server, llama: ollama.Client, http: httpx.Client) -> None:
    names = [model.model for model in llama.list().models]
    assert names == [card["id"] for card in http.get("/v1/models").json()["data"]]
    assert "small" in [model.model for model in llama.ps().models]
    shown = llama.show("large:latest")
    assert shown.capabilities
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.modelinfo
    assert shown.modelinfo["outrider.context_length"] == MAX_CONTEXT
    read_answer(OllamaModels, http.get("/api/tags").content)
    read_answer(LoadedModels, http.get("/api/ps").content)
    read_answer(ShownModel, http.post("/api/show", json={"model": "small"}).content)
    read_answer(OllamaVersion, http.get("/api/version").content)
    assert http.head("/").status_code == 200


def test_failures_have_the_shape_that_the_client_knows(
    server: Server, llama: ollama.Client, http: httpx.Client
) -> None:
    with pytest.raises(ollama.ResponseError, match="gone") as unknown:
        llama.chat("gone", HELLO)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="gone"):
        llama.show("gone")
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        llama.chat("auto", HELLO, options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match=r"messages\.0\.images.*text only"):
        llama.chat("auto", [{**HELLO[0], "images": [b"\x89PNG"]}])
    with pytest.raises(ollama.ResponseError, match=r"images.*text only"):
        llama.generate("auto", "Hi", images=[b"\x89PNG"])
    with pytest.raises(ollama.ResponseError, match=r"suffix.*filling in"):
        llama.generate("auto", "Hi", suffix="x")
    with pytest.raises(ollama.ResponseError, match="/api/pull"):
        llama.pull("llama")
    wrong = http.post("/api/chat", content=b"{", headers={"content-type": "application/json"})
    assert wrong.status_code == 400
    read_answer(OllamaError, wrong.content)
    read_answer(OllamaError, http.post("/api/tags").content)
    server.engine.script = lambda _: Script(
        refusal=QueueFullError(num_waiting=1, retry_after_s=1.0)
    )
    busy = http.post("/api/chat", json={"model": "auto", "messages": HELLO})
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    read_answer(OllamaError, busy.content)


def test_a_stream_that_breaks_off(server: Server, llama: ollama.Client) -> None:
    server.says(TEXT, failure=("internal", "the engine fell over"))
    texts: list[str] = []
    with pytest.raises(ollama.ResponseError):
        texts.extend(part.message.content or "" for part in llama.chat("auto", HELLO, stream=True))
    assert "".join(texts) == TEXT


@pytest.mark.slow
def test_keys_and_books(opened: OpenWorld) -> None:
    with opened() as books:
        url = books.world.url
        body = {"model": "small", "messages": HELLO, "options": {"num_predict": 4}}
        refused = httpx.post(f"{url}/api/chat", json=body)
        assert refused.status_code == 401
        read_answer(OllamaError, refused.content)
        read_answer(OllamaError, httpx.get(f"{url}/api/tags").content)
        told = books.world.http.post("/api/chat", json=body)
        last = json.loads(told.text.splitlines()[-1])
        (row,) = books.rows(1)
        assert row["endpoint"] == "ollama_chat"
        assert row["num_prompt_tokens"] == last["prompt_eval_count"]


@pytest.mark.slow
def test_images_go_to_tiers_that_read_them(open_world: OpenWorld) -> None:
    with open_world(tier={"supports": ["images"]}) as world:
        with ollama.Client(host=world.url) as client:
            assert client.generate("cloud", "What is it?", images=[b"\x89PNG\r\n"]).response
        asked = [json.loads(one.body) for one in world.clouds[0].requests if one.body]
        parts = asked[-1]["messages"][0]["content"]
        assert parts[0] == {"type": "text", "text": "What is it?"}
        assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
