"""Valid and invalid requests; a refusal names the field."""

import json

import pytest
from pydantic import BaseModel

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.parsing import parse
from tests.gateway.contract.schema.harmless import HARMLESS

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "auto", "prompt": "Hi"}


def refusal(model: type[BaseModel], document: object) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse(model, json.dumps(document).encode())
    problem = problem_of(caught.value)
    assert problem.status == 400
    assert problem.type == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize("field", HARMLESS)
def test_accepted(field: str) -> None:
    for value in HARMLESS[field]:
        parse(ChatRequest, json.dumps({**CHAT, field: value}).encode())


NOT_SUPPORTED = {
    "audio": {},
    "modalities": ["text", "audio"],
}


@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_unsupported_values_are_named(field: str) -> None:
    error = refusal(ChatRequest, {**CHAT, field: NOT_SUPPORTED[field]})
    assert error.param == field
    assert "not supported" in str(error)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),  # JSON's false is not 0
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 10.5}, "repetition_penalty"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["x" * 257]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"outrider": {"speculation": "maybe"}}, "outrider.speculation"),
        ({"outrider": {"max_draft_nodes": 256}}, "outrider.max_draft_nodes"),
        ({"outrider": {"depth": 1}}, "outrider.depth"),
        ({"outrider": {"sources": 5}}, "outrider.sources"),
        ({"outrider": {"tier": 5}}, "outrider.tier"),
        ({"outrider": {"policy": "cheap"}}, "outrider.policy"),
        ({"outrider": {"policy": ["local_only"]}}, "outrider.policy"),
        ({"outrider": {"privacy": "local"}}, "outrider.privacy"),
        ({"outrider": {"privacy": True}}, "outrider.privacy"),
        ({"outrider": {"deadline_ms": 0}}, "outrider.deadline_ms"),
        ({"outrider": {"deadline_ms": 86_400_001}}, "outrider.deadline_ms"),
        ({"outrider": {"deadline_ms": "100"}}, "outrider.deadline_ms"),
        ({"outrider": {"min_quality": 1.01}}, "outrider.min_quality"),
        ({"outrider": {"prefer": "speed"}}, "outrider.prefer"),
        ({"outrider": {"min_quality": "high"}}, "outrider.min_quality"),
        ({"outrider": {"max_cost_usd": 0}}, "outrider.max_cost_usd"),
        ({"outrider": {"max_cost_usd": True}}, "outrider.max_cost_usd"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
        ({"functions": [{"name": "f"}] * 1025}, "functions"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages.0.y"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
            "messages.0.tool_calls.0.id",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ],
)
def test_wrong_values_are_named(extra: dict[str, object], param: str) -> None:
    assert refusal(ChatRequest, {**CHAT, **extra}).param == param


def test_an_image_is_named_in_words() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    error = refusal(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert error.param == "messages.0.content.1.type"
    assert "image_url" in str(error)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [["x"]]}, "prompt.0.0"),
        ({"prompt": None}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"input_extra": [{}]}, "input_extra.0.text"),
        ({"messages": []}, "messages"),
    ],
)
def test_completions_refuse(extra: dict[str, object], param: str) -> None:
    assert refusal(CompletionRequest, {**COMPLETION, **extra}).param == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"model": "\xed\xa0\x80"}', b'{"model": "\\ud800"}', b"[" * 1000],
)
def test_malformed_json(body: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(ChatRequest, body)
    assert caught.value.code == "invalid_json"
    assert caught.value.param is None


@pytest.mark.parametrize("body", [b"[]", b"null", b"5"])
def test_json_that_is_no_object(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="body"):
        parse(ChatRequest, body)


def test_an_answer_can_be_sent_back() -> None:
    """What the openai client makes of our message, nulls and all, is a valid next turn."""
    answer = {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "Well",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    turns = [*CHAT["messages"], answer, {"role": "user", "content": "Go on"}]
    request = parse(ChatRequest, json.dumps({**CHAT, "messages": turns}).encode())
    assert request.last_user_text == "Go on"


def test_the_newer_name_of_max_tokens_wins() -> None:
    body = json.dumps({**CHAT, "max_tokens": 5, "max_completion_tokens": 7}).encode()
    assert parse(ChatRequest, body).token_limit == 7
