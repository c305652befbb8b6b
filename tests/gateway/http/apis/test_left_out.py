"""What clients of other servers send and this gateway has no use for is left out and named."""

import asyncio
import json
from typing import Any

import pytest

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.unknown_fields import read_known
from outrider.gateway.http.apis.api import Api, TranslatedRequest
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.responses.api import ResponsesApi

ASKED = {"role": "user", "content": "Hello"}
SEARCHED = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"url": "x"}]},
]
BASES: dict[str, dict[str, Any]] = {
    "responses": {"input": "Hello"},
    "messages": {"max_tokens": 9, "messages": [ASKED]},
}
CASES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("responses", {"store": True}, ("store",)),
    ("responses", {"store": False, "truncation": "disabled", "moderation": None}, ()),
    ("responses", {"truncation": "auto"}, ("truncation",)),
    ("responses", {"context_management": [{"type": "compaction"}]}, ("context_management",)),
    ("responses", {"tools": [{"type": "web_search"}]}, ("tools.0.type",)),
    ("responses", {"input": [ASKED, {"type": "web_search_call", "id": "w"}]}, ("input.1.type",)),
    ("responses", {"stream": True, "stream_options": {"include_obfuscation": True}}, ()),
    ("responses", {"metadata": {"a": {"b": [1]}}}, ()),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("tools.0.type",)),
    ("messages", {"mcp_servers": [{"type": "url", "url": "https://x"}]}, ("mcp_servers",)),
    ("messages", {"container": "c"}, ("container",)),
    ("messages", {"context_management": {"edits": [{"type": "x"}]}}, ("context_management",)),
    ("messages", {"thinking": {"type": "enabled"}}, ()),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 10}}, ()),
    (
        "messages",
        {"messages": [ASKED, {"role": "assistant", "content": SEARCHED}, ASKED]},
        ("messages.1.content.0.type", "messages.1.content.1.type"),
    ),
    (
        "messages",
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
                ASKED,
            ]
        },
        (),
    ),
)


def translated(name: str, fields: dict[str, Any], *, ignores: bool = True) -> TranslatedRequest:
    api: Api
    if name == "responses":
        api = ResponsesApi(has_upstream_tiers=False, ignores_unknown=ignores)
    else:
        api = MessagesApi(has_upstream_tiers=False, ignores_unknown=ignores)
    return asyncio.run(api.read(json.dumps({**BASES[name], **fields}).encode()))


@pytest.mark.parametrize(("name", "fields", "ignored"), CASES)
def test_it_is_left_out_and_named(name: str, fields: dict[str, Any], ignored: tuple) -> None:
    request = translated(name, fields)
    assert request.ignored == ignored
    assert parse(ChatRequest, request.chat_body).last_user_text == "Hello"


@pytest.mark.parametrize("name", BASES)
def test_a_request_without_a_model_means_auto(name: str) -> None:
    assert json.loads(translated(name, {}).chat_body)["model"] == "auto"


def test_a_search_of_an_earlier_answer_leaves_its_text() -> None:
    answer = {"role": "assistant", "content": [*SEARCHED, {"type": "text", "text": "It is 7."}]}
    made = json.loads(translated("messages", {"messages": [ASKED, answer, ASKED]}).chat_body)
    assert made["messages"] == [ASKED, {"role": "assistant", "content": "It is 7."}, ASKED]


def test_tools_beside_a_servers_own_stay() -> None:
    own = {"name": "f", "input_schema": {"type": "object"}}
    foreign = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    made = json.loads(translated("messages", {"tools": [foreign, own]}).chat_body)
    assert [tool["function"]["name"] for tool in made["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, fields) for name, fields, ignored in CASES if any("type" in path for path in ignored)],
)
def test_strict_gateways_refuse_what_others_leave_out(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="not supported"):
        translated(name, fields, ignores=False)


CHAT = {"messages": [ASKED]}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"store": True}, ("store",)),
        ({"web_search_options": {}}, ("web_search_options",)),
        ({"moderation": {"model": "m"}}, ("moderation",)),
        ({"metadata": {"a": {"b": 1}}}, ()),
        ({"stop": ""}, ()),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, ()),
    ],
)
def test_services_that_are_not_here_are_left_out_of_a_chat(
    fields: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    body = json.dumps({**CHAT, **fields}).encode()
    request, named = read_known(ChatRequest, None, body, ignores_unknown=True)
    assert named == ignored
    assert (request.model, request.stop_strings) == ("auto", ())


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_earlier_thought_has_either_name(name: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": "7", name: "Hm."}, ASKED]
    request = ChatRequest.model_validate({"messages": messages})
    assert [getattr(message, "thoughts", None) for message in request.messages][1] == "Hm."
