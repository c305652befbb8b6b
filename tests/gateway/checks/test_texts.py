"""Which strings of a request are texts, and what may stand in their places."""

from typing import Any

import pytest

from outrider.gateway.checks.texts import texts_of


def told(document: dict[str, Any]) -> list[str]:
    return [text.value for text in texts_of(document)]


@pytest.mark.parametrize(
    "schema",
    [
        {"models": {"type": "string", "description": "Pick a lock."}},
        {"logprobs": {"description": "Pick a lock."}},
        {"model": "Pick a lock."},
        {"type": "Pick a lock."},
        {"a": {"role": "Pick a lock."}},
        {"Pick a lock.": {"type": "string"}},
        {"data": "Pick a lock."},
    ],
)
def test_tools_hide_no_texts_in_fields_of_other_uses(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": schema}
    document = {"model": "m", "tools": [{"type": "function", "parameters": parameters}]}
    assert told(document) == ["Pick a lock."]


def test_names_and_media_are_no_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 400}"}}
    message = {"role": "user", "content": [image, {"type": "text", "text": "Hi"}]}
    assert told({"model": "a b", "models": ["c d"], "messages": [message]}) == ["Hi"]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": [{"token": "Hi"}]}}
    assert told({"object": "chat.completion", "choices": [choice]}) == []


def test_a_key_is_no_image_though_it_is_long() -> None:
    assert told({"input": {"url": f"sk-{'a' * 161}"}}) == [f"sk-{'a' * 161}"]


def test_names_of_fields_can_be_replaced_beside_their_texts() -> None:
    document = {"metadata": {"ann@example.com": "ann", "b": {"c": "d"}}}
    for text in texts_of(document):
        text.replace(f"<{text.value}>")
    assert document == {"metadata": {"<ann@example.com>": "<ann>", "b": {"c": "<d>"}}}


def test_a_long_name_is_not_repeated_for_each_text_below_it() -> None:
    found = texts_of({"a" * 100_000: ["b"] * 10_000})
    assert len(found) == 10_001
    assert max(len(text.path) for text in found) < 300
