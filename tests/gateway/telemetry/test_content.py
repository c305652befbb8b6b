"""Texts as attributes: every API's format, bounded whatever clients send."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.telemetry.content import MAX_CHARS, content_attributes


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": "x"}, [("user", ["x"])]),
        ({"input": "x"}, [("user", ["x"])]),
        ({"input": [{"role": "developer", "content": "x"}]}, [("developer", ["x"])]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]},
            [("user", ["x", "y"])],
        ),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {}}]}]}, [("user", [None])]),
    ],
)
def test_messages_of_all_apis(body: dict[str, Any], asked: list[Any]) -> None:
    messages = json.loads(content_attributes(body, [])["gen_ai.input.messages"])
    assert [(m["role"], [p.get("content") for p in m["parts"]]) for m in messages] == asked


def test_calls_and_instructions() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "system": [{"type": "text", "text": "be short"}],
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
    }
    found = content_attributes(body, [])
    (message,) = json.loads(found["gen_ai.input.messages"])
    assert message["parts"] == [{"type": "tool_call", "id": "c1", "name": "f", "arguments": "{}"}]
    assert json.loads(found["gen_ai.system_instructions"]) == [
        {"type": "text", "content": "be short"}
    ]


def test_the_last_messages_stay() -> None:
    messages = [{"role": "user", "content": f"{number}{'x' * 3000}"} for number in range(100)]
    text = content_attributes({"messages": messages}, ["y" * 100_000])
    kept = json.loads(text["gen_ai.input.messages"])
    assert [m["parts"][0]["content"].rstrip("x") for m in kept] == ["95", "96", "97", "98", "99"]
    assert all(len(each) <= MAX_CHARS for each in text.values())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "content", "tool_calls", "function", "text", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def test_half_a_pair_of_surrogates_can_be_sent() -> None:
    body = json.loads('{"prompt": "a\\ud800b"}')
    content_attributes(body, ["\udfff"])["gen_ai.input.messages"].encode("utf-8")


@given(_JSON)
def test_no_body_is_too_odd(body: Any) -> None:
    for text in content_attributes(body, []).values():
        assert isinstance(json.loads(text), list)
