"""Our own count of a server's tokens, against the tokenizer itself."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.gateway.answering.text.token_counts import TokenCounter
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.upstream.call import UpstreamCall

TALK = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "漢字 🙂 today?"},
]


@pytest.fixture(scope="module")
def counter(tokenizer_folder: Path) -> TokenCounter:
    return TokenCounter.load(str(tokenizer_folder))


@pytest.fixture(scope="module")
def reference(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(tokenizer_folder))


def call(endpoint: Endpoint = "chat", **document: Any) -> UpstreamCall:
    return UpstreamCall(
        endpoint=endpoint, document=document, model="m", request_id="r", arrival_s=0.0
    )


def ids(reference: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    encoded = reference.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return list(encoded["input_ids"])


def test_text_is_counted_as_an_answer_has_it(counter: TokenCounter, reference: Any) -> None:
    for text in ("", "Hello", "The quick brown fox", "漢字かな交じり文 🙂🙃"):
        assert counter.count_text(text) == len(reference.encode(text, add_special_tokens=False))


def test_a_conversation_is_counted_through_its_template(
    counter: TokenCounter, reference: Any
) -> None:
    expected = len(ids(reference, TALK, add_generation_prompt=True))
    assert counter.count_prompt(call(messages=TALK)) == expected
    parts = [*TALK[:2], {"role": "user", "content": [{"type": "text", "text": "漢字 🙂 today?"}]}]
    assert counter.count_prompt(call(messages=parts)) == expected
    without = len(ids(reference, TALK, add_generation_prompt=False))
    assert without < expected
    assert counter.count_prompt(call(messages=TALK, add_generation_prompt=False)) == without


def test_a_final_message_that_goes_on(counter: TokenCounter, reference: Any) -> None:
    begun = [*TALK, {"role": "assistant", "content": "It is"}]
    expected = len(ids(reference, begun, continue_final_message=True))
    counted = counter.count_prompt(
        call(messages=begun, continue_final_message=True, add_generation_prompt=False)
    )
    assert counted == expected
    assert counter.count_prompt(call(messages=begun, continue_final_message=True)) == expected


def test_variables_of_the_template_count(counter: TokenCounter) -> None:
    plain = counter.count_prompt(call(messages=TALK))
    thinking = counter.count_prompt(
        call(messages=TALK, chat_template_kwargs={"enable_thinking": True})
    )
    assert plain is not None
    assert thinking is not None
    assert thinking > plain


def test_prompts_of_completions(counter: TokenCounter, reference: Any) -> None:
    one = len(reference.encode("The quick brown fox"))
    assert counter.count_prompt(call("completion", prompt="The quick brown fox")) == one
    two = call("completion", prompt=["The quick brown fox", "The quick brown fox"])
    assert counter.count_prompt(two) == 2 * one
    assert counter.count_prompt(call("completion", prompt=[5, 6, 7])) == 3
    assert counter.count_prompt(call("completion", prompt=[[5, 6], [7]])) == 3


@pytest.mark.parametrize(
    "document",
    [
        {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": "x"}] * 2},  # refused by the template
        {"messages": [{"role": "user", "content": "x" * 40_000}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": "x"},
        {"messages": TALK, "chat_template_kwargs": {"tokenize": True}},
        {},
    ],
)
def test_uncountable_chats_are_not_counted(counter: TokenCounter, document: dict[str, Any]) -> None:
    assert counter.count_prompt(call(**document)) is None


@pytest.mark.parametrize("prompt", [None, "x" * 40_000, ["a", None], {"a": 1}])
def test_prompts_that_are_not_counted(counter: TokenCounter, prompt: object) -> None:
    assert counter.count_prompt(call("completion", prompt=prompt)) is None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        TokenCounter.load(str(tmp_path))
