"""Requests that chat refuses are refused by the Responses, Messages and Ollama's API too."""

import asyncio
import json
from typing import Any

import pytest

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.template_variables import read_variables
from outrider.gateway.http.apis.api import Api
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.ollama.api import OllamaChat, OllamaParts
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.responses.paths import in_own_words

HELLO = [{"role": "user", "content": "Hello"}]
BASES: dict[str, dict[str, Any]] = {
    "responses": {"model": "auto", "input": "Hello"},
    "messages": {"model": "auto", "max_tokens": 9, "messages": HELLO},
    "ollama": {"model": "auto", "messages": HELLO},
}
# What chat refuses by a name or a value.
BY_CHAT: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"n": 10**6},
    {"best_of": 2},
    {"echo": True},
    {"temperature": 3},
    {"top_p": 0},
    {"user": ["a"]},
    {"stream": "yes"},
    {"model": ["auto"]},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function", "name": "a b"}]},
    {"tool_choice": {"type": "mcp"}},
    {"outrider": {"tier": 1}},
    {"outrider": {"prvacy": "private"}},
    {"outrider": {"max_cost_usd": -1}},
    {"cache_salt": "x"},
    {"kv_transfer_params": {}},
    {"priority": 9},
    {"lora_path": "/etc"},
    {"web_search_options": {}},
    {"modalities": ["audio"]},
    {"extra_body": {}},
)
OWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("responses", {"previous_response_id": "resp_of_another_tenant"}),
    ("responses", {"conversation": "conv_1"}),
    ("responses", {"background": True}),
    ("responses", {"prompt": {"id": "pmpt_1"}}),
    ("responses", {"truncation": "oldest"}),
    ("responses", {"include": ["file:///etc/passwd"]}),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_of_another_tenant"}]}),
    ("responses", {"metadata": {str(index): "x" for index in range(17)}}),
    ("responses", {"metadata": {"x" * 65: "a"}}),
    ("responses", {"safety_identifier": "x" * 513}),
    ("responses", {"top_logprobs": 21}),
    ("responses", {"stop": ["x"] * 17}),
    ("responses", {"logit_bias": {"1": 101}}),
    ("responses", {"tools": [{"type": "function", "name": "f"}] * 1025}),
    ("messages", {"stop_sequences": ["x"] * 17}),
    ("messages", {"metadata": {"user_id": "x" * 513}}),
    ("messages", {"service_tier": "priority"}),
    ("messages", {"tools": [{"name": "f", "input_schema": {}}] * 1025}),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 10**30}}),
    ("messages", {"max_tokens": -1}),
    ("messages", {"system": [{"type": "image", "source": {}}]}),
    ("ollama", {"options": {"temperature": 3}}),
    ("ollama", {"options": {"stop": ["x"] * 17}}),
    ("ollama", {"options": {"seed": 2**63}}),
    ("ollama", {"options": {"num_predict": 10**30}}),
    ("ollama", {"options": {"repeat_penalty": 0}}),
    ("ollama", {"options": ["temperature"]}),
    ("ollama", {"format": "xml"}),
    ("ollama", {"format": 5}),
    ("ollama", {"think": "very"}),
    ("ollama", {"messages": [{"role": "developer", "content": "x"}]}),
    ("ollama", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("ollama", {"messages": [{"role": "user", "content": "x", "images": ["http://127.0.0.1/"]}]}),
    ("ollama", {"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}),
)
URLS = ("http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "gopher://127.0.0.1:6379/")


def ollama_parts(**options: bool) -> OllamaParts:
    """Of a gateway whose names never end in :latest."""

    async def meant_name(name: str) -> str:
        return name.removesuffix(":latest")

    return OllamaParts(meant_name=meant_name, **{"has_upstream_tiers": False, **options})


def surface(name: str, *, elsewhere: bool = False) -> Api:
    if name == "responses":
        return ResponsesApi(has_upstream_tiers=elsewhere)
    if name == "ollama":
        return OllamaChat(parts=ollama_parts(has_upstream_tiers=elsewhere))
    return MessagesApi(has_upstream_tiers=elsewhere)


def read_here(name: str, fields: dict[str, Any]) -> ChatRequest:
    """The request as the local models get it."""
    body = json.dumps({**BASES[name], **fields}).encode()
    return parse(ChatRequest, asyncio.run(surface(name).read(body)).chat_body)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("fields", BY_CHAT)
def test_requests_refused_by_chat_are_refused_by_other_apis(
    name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError):
        read_here(name, fields)


@pytest.mark.parametrize(("name", "fields"), OWN)
def test_fields_of_one_api_have_its_bounds(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        read_here(name, fields)


@pytest.mark.parametrize("url", URLS)
def test_no_address_of_a_client_is_fetched(url: str) -> None:
    """Local models take no images; an upstream tier is sent the address as it is, unread."""
    image = {"type": "image", "source": {"type": "url", "url": url}}
    fields = {"messages": [{"role": "user", "content": [image]}]}
    with pytest.raises(BadRequestError, match="text only"):
        read_here("messages", fields)
    content = [{"type": "input_image", "image_url": url}]
    with pytest.raises(BadRequestError):
        read_here("responses", {"input": [{"role": "user", "content": content}]})
    body = json.dumps({**BASES["messages"], **fields}).encode()
    chat = json.loads(asyncio.run(surface("messages", elsewhere=True).read(body)).chat_body)
    assert chat["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": url}}]


def test_encrypted_reasoning_of_another_server_is_skipped() -> None:
    secret = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    request = read_here("responses", {"input": [*HELLO, secret]})
    assert "gAAAA" not in request.model_dump_json()


@pytest.mark.parametrize("name", ["\\q", "\\g<9>", "\\1"])
def test_a_refused_name_with_backslashes_is_told_as_it_is(name: str) -> None:
    """Issue 15, second round: they were read as a pattern's, and the client got no answer."""
    with pytest.raises(BadRequestError) as caught:
        read_variables({name: {}})
    problem = in_own_words(problem_of(caught.value))
    assert problem.param == f"chat_template_kwargs.{name}"
    assert problem.message.startswith(f"chat_template_kwargs.{name}: ")
