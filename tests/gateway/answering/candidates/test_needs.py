"""Capabilities that a request requires: only what the local models do not take."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from outrider.gateway.answering.reading.required_capabilities import (
    NeedKind,
    RequiredCapability,
    describe,
    lacking,
    required_capabilities,
    uses_of,
)
from outrider.gateway.answering.text.structured import plan_structured
from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.kinds import Endpoint
from tests.gateway.contract.schema.harmless import HARMLESS

CHAT: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "auto", "prompt": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def says(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]}


def answered(**fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "x", **fields}
    return {"messages": [*CHAT["messages"], message]}


def kinds(document: dict[str, Any], endpoint: Endpoint = "chat") -> list[tuple[NeedKind, str]]:
    document = json.loads(json.dumps(document))
    return [(need.capability, need.param) for need in required_capabilities(document, endpoint)]


NEEDS: list[tuple[dict[str, Any], NeedKind, str]] = [
    (says({"type": "image_url", "image_url": {"url": "x"}}), "images", "messages.1.content.0.type"),
    (says({"type": "text", "text": "x"}, {"type": "input_image"}), "images",
     "messages.1.content.1.type"),
    (says({"type": "input_audio", "input_audio": {}}), "audio", "messages.1.content.0.type"),
    (says({"type": "file", "file": {}}), "files", "messages.1.content.0.type"),
    (says({"type": "video_url"}), "options", "messages.1.content.0.type"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "options", "messages.0.weight"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "options", "messages.0.role"),
    (answered(audio={"id": "a"}), "audio", "messages.1.audio"),
    (answered(refusal="no"), "options", "messages.1.refusal"),
    (answered(tool_calls=[{"id": "a", "type": "custom"}]), "tools", "messages.1.tool_calls.0.type"),
    (answered(tool_calls=[{**FUNCTION, "id": "a", "more": 1}]), "options",
     "messages.1.tool_calls.0.more"),
    ({"tools": [FUNCTION, {"type": "web_search"}]}, "tools", "tools.1.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tools", "tool_choice.type"),
    ({"audio": {"voice": "x"}}, "audio", "audio"),
    ({"modalities": ["text", "audio"]}, "audio", "modalities"),
    ({"stream_options": {"x": 1}}, "options", "stream_options.x"),
    ({"response_format": {"type": "grammar"}}, "options", "response_format.type"),
    ({"response_format": {**SCHEMA, "x": 1}}, "options", "response_format.x"),
    ({"tools": [FUNCTION], "response_format": SCHEMA}, "options", "response_format"),
    ({"tools": [FUNCTION], "structured_outputs": {"regex": "a"}}, "options", "structured_outputs"),
    ({"tools": [FUNCTION], "min_tokens": 3}, "options", "min_tokens"),
    ({"response_format": SCHEMA, "ignore_eos": True}, "options", "ignore_eos"),
    ({"max_tokns": 5}, "options", "max_tokns"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "capability", "param"), NEEDS)
def test_needs(extra: dict[str, Any], capability: NeedKind, param: str) -> None:
    document = {**CHAT, **extra}
    assert kinds(document) == [(capability, param)]
    assert not is_local(document, "chat")


def test_a_search_goes_to_a_server_where_there_is_one() -> None:
    document = {**CHAT, "web_search_options": {}}
    assert kinds(document) == [("options", "web_search_options")]
    assert is_local(document, "chat")


@pytest.mark.parametrize(
    "extra",
    [
        says({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}),
        {"tools": [{**FUNCTION, "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_a_mark_for_anothers_cache_sends_no_request_away(extra: dict[str, Any]) -> None:
    assert kinds({**CHAT, **extra}) == []


@pytest.mark.parametrize("hint", ["reasoning_effort", "verbosity"])
def test_a_hint_sends_no_request_away(hint: str) -> None:
    assert kinds({**CHAT, hint: "low"}) == []


def test_a_suffix_is_a_need_where_no_model_has_the_tokens_for_it() -> None:
    document = {**COMPLETION, "suffix": "x"}
    assert kinds(document, "completion") == []
    (need,) = required_capabilities(document, "completion", fills_in=False)
    assert (need.capability, need.param) == ("options", "suffix")


@pytest.mark.parametrize(
    "extra",
    [{"best_of": 3}, {"max_completion_tokens": 5}],
)
def test_needs_of_completions(extra: dict[str, Any]) -> None:
    (name,) = extra
    assert kinds({**COMPLETION, **extra}, "completion") == [("options", name)]
    assert not is_local({**COMPLETION, **extra}, "completion")


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 5},
        {"temperature": "1"},
        {"n": 17},
        {"top_logprobs": 21},
        {"messages": []},
        {"messages": "x"},
        {"messages": [5]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": 5, "content": [{"type": 7}]}]},
        {"tools": "x"},
        {"tools": [5]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tool_choice": "always"},
        {"tool_choice": "required"},
        {"response_format": 5},
        {"response_format": {"type": 5}},
        {"stream_options": 5},
        {"outrider": {"depth": 1}},
        {"stop": ["x"] * 17},
    ],
)
def test_errors_on_every_tier_are_no_required_capability(extra: dict[str, Any]) -> None:
    assert kinds({**CHAT, **extra}) == []
    assert not is_local({**CHAT, **extra}, "chat")


@pytest.mark.parametrize("field", HARMLESS)
def test_requests_for_local_models_require_no_capability(field: str) -> None:
    for value in HARMLESS[field]:
        assert kinds({**CHAT, field: value}) == []


def is_local(document: dict[str, Any], endpoint: Endpoint) -> bool:
    """Return whether the local models take it, as far as the request alone tells."""
    model: type[BaseModel] = ChatRequest if endpoint == "chat" else CompletionRequest
    try:
        request = model.model_validate_json(json.dumps(document))
        plan = plan_tools(request) if isinstance(request, ChatRequest) else None
        structured = plan_structured(request)
    except (ValidationError, BadRequestError):
        return False
    has_grammar = plan is not None or structured is not None
    if has_grammar and (request.min_tokens or request.ignore_eos):
        return False
    return plan is None or structured is None


PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_audio", "file"])},
    optional={"text": st.just("x"), "extra": st.none()},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function", "developer"])},
    optional={
        "content": st.none() | st.just("x") | st.lists(PARTS, max_size=2),
        "tool_call_id": st.just("a"),
        "name": st.just("n"),
        "audio": st.sampled_from([None, {}]),
        "refusal": st.sampled_from([None, "x"]),
        "annotations": st.sampled_from([None, [], [1]]),
        "reasoning_content": st.just("x"),
        "tool_calls": st.sampled_from(
            [
                None,
                [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
                [{"id": "a", "type": "custom"}],
            ]
        ),
        "other": st.none(),
    },
)
VALUES = {
    "messages": st.lists(MESSAGES, min_size=1, max_size=3),
    "tools": st.sampled_from([None, [], [FUNCTION], [{"type": "mcp"}], [{**FUNCTION, "x": 1}]]),
    "tool_choice": st.sampled_from(
        [None, "none", "auto", "required", FUNCTION, {"type": "custom"}]
    ),
    "functions": st.sampled_from([None, [], [{}]]),
    "function_call": st.sampled_from([None, "none", "auto", {}]),
    "response_format": st.sampled_from([None, {"type": "text"}, SCHEMA, {"type": "json_object"}]),
    "structured_outputs": st.sampled_from([None, {"regex": "a"}, {"json": {}}]),
    "min_tokens": st.sampled_from([None, 0, 3]),
    "ignore_eos": st.sampled_from([None, False, True]),
    "modalities": st.sampled_from([None, ["text"], ["audio"], []]),
    "stream_options": st.sampled_from([None, {}, {"include_obfuscation": False}, {"y": None}]),
    "temperature": st.sampled_from([None, 0, 1, 5]),
    "continue_final_message": st.sampled_from([None, False]),
    "prediction": st.sampled_from([None, {"type": "content", "content": "x"}]),
    "other": st.none(),
    "echo": st.booleans(),
    "suffix": st.sampled_from([None, "", "x"]),
    "best_of": st.sampled_from([None, 1, 1.0, True, 2]),
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.sampled_from(["chat", "completion"]))
def test_the_local_models_take_nothing_that_has_needs(
    fields: dict[str, Any], endpoint: Endpoint
) -> None:
    if endpoint == "completion":
        fields.pop("messages", None)
    document = {**(CHAT if endpoint == "chat" else COMPLETION), **fields}
    if is_local(document, endpoint):
        assert required_capabilities(document, endpoint) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "type", "content", "function", "a"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*VALUES, "prompt"]), JSON), st.booleans())
def test_anything_is_looked_at_without_harm(document: dict[str, Any], is_chat: bool) -> None:
    endpoint: Endpoint = "chat" if is_chat else "completion"
    needs = required_capabilities(document, endpoint)
    assert len(set(needs)) == len(needs)
    assert not (uses_of(document, endpoint) & {"options"})


# ---- what servers are asked --------------------------------------------------------------------


def test_uses() -> None:
    assert uses_of(CHAT, "chat") == set()
    assert uses_of({**CHAT, "tools": [FUNCTION]}, "chat") == {"tools"}
    assert uses_of({**CHAT, "tools": []}, "chat") == set()
    assert uses_of({**CHAT, "reasoning_effort": "low"}, "chat") == set()
    document = {**CHAT, **says({"type": "image_url"}, {"type": "file"}), "audio": {}}
    document["messages"] = list(document["messages"])
    document["messages"][1]["content"] = list(document["messages"][1]["content"])
    assert uses_of(document, "chat") == {"images", "files", "audio"}


def test_a_server_lacks_the_capabilities_it_does_not_list() -> None:
    needs = (
        RequiredCapability(capability="images", param="a"),
        RequiredCapability(capability="options", param="b"),
        RequiredCapability(capability="tools", param="c"),
    )
    assert lacking(needs, ("tools", "images")) == ()
    assert lacking(needs, ("tools",)) == needs[:1]
    assert lacking(needs, ()) == (needs[0], needs[2])


def test_a_need_in_words_is_fit_for_a_header() -> None:
    images = RequiredCapability(capability="images", param="messages.1.content.0.type")
    words = "capability: the local models do not take images (messages.1.content.0.type)"
    assert describe((images,)) == words
    assert describe((images, images, images)) == f"{words} and 2 more"
    for param in ("x\r\nset-cookie: a", "ünsäglich", "x" * 65, ""):
        made = describe((RequiredCapability(capability="options", param=param),))
        assert made == "capability: the local models do not take options"
