"""Thinking that was edited beside its tokens is found, whichever dialect shows it.

The bundled pair under a template that opens a thought, which it ends only where a budget says so.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.gateway.tools.commands.verify.answer_file import whole_of
from tests.laws.gateways import Gateway, gateway
from tests.laws.test_thinking_law import TEMPLATE
from tests.laws.test_verified_answers_law import MESSAGES, assert_matches, verified

CHAT: dict[str, Any] = {
    "model": "large",
    "messages": MESSAGES,
    "max_tokens": 40,
    "temperature": 1,
    "seed": 5,
    "outrider": {"receipt": True},
}
BUDGET: dict[str, Any] = {"thinking_token_budget": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    template = tmp_path_factory.mktemp("template") / "thinks.jinja"
    template.write_text(TEMPLATE)
    with gateway({"models.chat_template": str(template)}) as running:
        yield running


def streamed(served: Gateway, request: dict[str, Any]) -> dict[str, Any]:
    text = served.http.post("/v1/chat/completions", json={**request, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return whole_of(map(json.loads, lines))


def assert_edited(report: dict[str, Any]) -> None:
    assert (report["matches"], report["explanation"]) == (False, "edited text"), report


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [{}, BUDGET])
def test_edited_thinking_is_found(served: Gateway, budget: dict[str, Any], *, stream: bool) -> None:
    request = {**CHAT, **budget}
    if stream:
        answer = streamed(served, request)
    else:
        answer = served.http.post("/v1/chat/completions", json=request).json()
    message = answer["choices"][0]["message"]
    thought = message["reasoning_content"]
    assert thought
    assert bool(message.get("content")) == bool(budget)
    assert_matches(verified(served, answer, request=request))
    hidden = copy.deepcopy(answer)
    del hidden["choices"][0]["message"]["reasoning_content"]
    assert_matches(verified(served, hidden, request=request))
    for edit in (f"{thought} Or so.", thought[: len(thought) // 2], thought[::-1]):
        message["reasoning_content"] = edit
        assert_edited(verified(served, answer, request=request))


@pytest.mark.slow
def test_an_answer_that_stands_in_its_thinking_is_found(served: Gateway) -> None:
    request = {**CHAT, **BUDGET}
    answer = served.http.post("/v1/chat/completions", json=request).json()
    message = answer["choices"][0]["message"]
    message["content"] = message.pop("reasoning_content")
    assert_edited(verified(served, answer, request=request))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["responses", "messages"])
def test_edited_thinking_of_other_dialects_is_found(served: Gateway, path: str) -> None:
    """Their answers name no tokens: they are written anew, with the marks of thinking."""
    body: dict[str, Any] = {"model": "large", "outrider": {"receipt": True}, "temperature": 0}
    if path == "responses":
        body |= {"input": MESSAGES[0]["content"], "max_output_tokens": 30}
    else:
        body |= {"messages": MESSAGES, "max_tokens": 30, "thinking": {"type": "adaptive"}}
    answer = served.http.post(f"/v1/{path}", json=body).json()
    (part,) = (
        answer["output"][0]["summary"]
        if path == "responses"
        else [each for each in answer["content"] if each["type"] == "thinking"]
    )
    report = verified(served, answer, request={"messages": MESSAGES})
    assert_matches(report)
    assert report["retokenised"]
    name = "thinking" if path == "messages" else "text"
    part[name] = part[name].replace(" ", " 7", 1)
    report = verified(served, answer, request={"messages": MESSAGES})
    assert not report["matches"]
    assert report["receipt"]["answer_matches"] is False
