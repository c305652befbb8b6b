"""/v1/tokenize and /v1/detokenize on a real server, against what the engine is given."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.apis.tokenize_schema import Detokenized, Tokenized, TokenizerInfo
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello 漢字"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]


def tokenize(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokenize", json=fields)
    assert answer.status_code == 200, answer.text
    read_answer(Tokenized, answer.content)
    document: dict[str, Any] = answer.json()
    assert document["count"] == len(document["tokens"])
    return document


def detokenize(http: httpx.Client, tokens: list[int]) -> str:
    answer = http.post("/v1/detokenize", json={"tokens": tokens})
    assert answer.status_code == 200, answer.text
    return read_answer(Detokenized, answer.content).prompt


def refused(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json=fields)
    assert answer.status_code in (400, 404), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_text(http: httpx.Client, encode: Callable[[str], list[int]]) -> None:
    told = tokenize(http, prompt="Hello there", return_token_strs=True)
    assert told["tokens"] == encode("Hello there")
    assert "".join(told["token_strs"]) == "Hello there"
    assert (told["tier"], told["max_model_len"]) == ("large", 256)
    assert tokenize(http, model="small", prompt="")["tier"] == "small"
    assert tokenize(http, prompt="Hello")["token_strs"] is None


def test_special_tokens_are_put_around_a_text_unless_they_are_not_wanted(
    http: httpx.Client, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        """Puts a token in front, as tokenizers with a BOS do."""

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> Any:
            ids = [1, 2, 3] if add_special_tokens else [2, 3]
            return [type("Encoding", (), {"ids": ids})() for _ in texts]

    monkeypatch.setattr(tokenizer, "_backend", Backend())
    assert tokenize(http, prompt="x")["tokens"] == [1, 2, 3]
    assert tokenize(http, prompt="x", add_special_tokens=True)["tokens"] == [1, 2, 3]
    assert tokenize(http, prompt="x", add_special_tokens=False)["tokens"] == [2, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"add_generation_prompt": False},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "Good"}],
            "continue_final_message": True,
        },
    ],
)
def test_a_conversation_has_the_tokens_that_the_engine_is_given(
    server: Server, http: httpx.Client, fields: dict[str, Any]
) -> None:
    asked = {"model": "large", "messages": MESSAGES, **fields}
    told = tokenize(http, **asked)
    assert not server.engine.submitted
    http.post("/v1/chat/completions", json={**asked, "max_tokens": 4}).raise_for_status()
    (request,) = server.engine.submitted
    assert told["tokens"] == list(request.prompt_token_ids)


def test_special_tokens_come_back_by_their_names(http: httpx.Client) -> None:
    tokens = tokenize(http, messages=MESSAGES[-1:], add_generation_prompt=False)["tokens"]
    assert detokenize(http, tokens) == "<|im_start|>user\nBye<|im_end|>\n"


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=200))
def test_there_and_back(http: httpx.Client, text: str) -> None:
    assert detokenize(http, tokenize(http, prompt=text)["tokens"]) == text


@pytest.mark.parametrize("path", ["/v1/tokenizer_info", "/tokenizer_info?model=large"])
def test_a_tokenizer_says_its_control_tokens(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    info = read_answer(TokenizerInfo, answer.content)
    assert (info.eos_token, info.bos_token) == ("<|im_end|>", None)
    assert (info.model_max_length, info.tier) == (256, "large")
    assert http.get("/v1/tokenizer_info?model=nothing").status_code == 404


def test_long_texts_are_done_in_a_thread(http: httpx.Client) -> None:
    text = "The quick brown fox. " * 2000
    told = tokenize(http, prompt=text, return_token_strs=True)
    assert told["count"] > 4096
    assert "".join(told["token_strs"]) == text == detokenize(http, told["tokens"])


def test_tokens_that_are_none(http: httpx.Client) -> None:
    assert detokenize(http, []) == ""
    assert refused(http, "/v1/detokenize", tokens=[420])["param"] == "tokens"
    for wrong in ([-1], [1.5], ["1"], [2**40], 5, None):
        assert refused(http, "/v1/detokenize", tokens=wrong)["param"].startswith("tokens")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * (2**20 + 1)}, None),  # the body is too large for this server
        ({"prompt": "x", "messages": MESSAGES}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ({"prompt": "x", "model": "gpt-9"}, "model"),
        ({"prompt": "x", "model": ""}, "model"),
    ],
)
def test_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    answer = http.post("/v1/tokenize", json=fields)
    assert answer.status_code in (400, 404, 413)
    assert answer.json()["error"]["param"] == param


def test_names_of_tiers_are_those_of_this_machine(http: httpx.Client) -> None:
    assert refused(http, "/v1/tokenize", prompt="x", model="gpt-9")["code"] == "model_not_found"
