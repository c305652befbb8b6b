"""`continue_final_message` and `add_generation_prompt`: an answer goes on behind a beginning."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.gateway.answering.jobs.prompts import prompt_end
from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from tests.engines import shipped_tokenizer
from tests.gateway.conftest import Server, real_gateway

QUESTION = {"role": "user", "content": "What is 17 + 48?"}
# Llama 3's way: what surrounds a text is cut off.
TRIMMING = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}

{{ message.content | trim }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant

{% endif -%}
"""
# Qwen 3's way: the last answer's thinking is written out, also where there is none.
THINKING = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and '<think>' not in message.content -%}
<think>
{{ message.reasoning_content or '' }}
</think>

{% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
TEMPLATES = {"chatml": None, "trimming": TRIMMING, "thinking": THINKING}
BEGINNINGS = (
    "17 + 48",
    "Let me see.\n\n1. ",
    "zwölf 漢字 🙂",
    " leading space",
    "trailing space ",
    "<|im_start|> is no token here, nor is <|im_end|>",
    "the tag is <think>",
    "",
)


def body(*turns: Any, **fields: Any) -> dict[str, Any]:
    fields.setdefault("continue_final_message", True)
    return {"model": "auto", "messages": [QUESTION, *turns], **fields}


def answer(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def render(tokenizer: ChatTokenizer, *turns: Any, **fields: Any) -> Prompt:
    request = ChatRequest.model_validate(body(*turns, **fields))
    return asyncio.run(tokenizer.render_chat(request.messages, None, (), prompt_end(request)))


@pytest.fixture(scope="module")
def loaded(tokenizer_folder: Path) -> dict[str, PreTrainedTokenizerFast]:
    """Transformers' own tokenizers, by the name of their template."""
    tokenizers = {"pair": shipped_tokenizer()}
    for name, template in TEMPLATES.items():
        tokenizers[name] = AutoTokenizer.from_pretrained(tokenizer_folder)
        if template is not None:
            tokenizers[name].chat_template = template
    return tokenizers


# ---- the prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["pair", *TEMPLATES])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_the_same_ids_as_transformers(
    loaded: dict[str, PreTrainedTokenizerFast], template: str, beginning: str
) -> None:
    theirs = loaded[template].apply_chat_template(
        [QUESTION, answer(beginning)],
        continue_final_message=True,
        sanitize_control_tokens=True,
        return_dict=False,
    )
    prompt = render(ChatTokenizer(loaded[template]), answer(beginning))
    assert list(prompt.token_ids) == theirs


@pytest.mark.slow
@given(beginning=st.text(max_size=60))
def test_the_bundled_pairs_prompt_ends_with_the_beginning(beginning: str) -> None:
    """Whatever it is, also in Unicode: it stands at the end, once, and nothing behind it."""
    tokenizer = ChatTokenizer(shipped_tokenizer())
    opened = asyncio.run(
        tokenizer.render_chat(ChatRequest.model_validate(body()).messages, None, ())
    )
    prompt = render(tokenizer, answer(beginning))
    assert prompt.token_ids[: len(opened.token_ids)] == opened.token_ids
    assert tokenizer.decode(prompt.token_ids[len(opened.token_ids) :]) == beginning


def test_long_beginnings_take_the_other_way(loaded: dict[str, PreTrainedTokenizerFast]) -> None:
    """Long prompts are tokenised in a thread."""
    beginning = "and on " * 1000
    theirs = loaded["chatml"].apply_chat_template(
        [QUESTION, answer(beginning)], continue_final_message=True, return_dict=False
    )
    prompt = render(ChatTokenizer(loaded["chatml"]), answer(beginning))
    assert list(prompt.token_ids) == theirs


def test_no_generation_prompt(loaded: dict[str, PreTrainedTokenizerFast]) -> None:
    theirs = loaded["chatml"].apply_chat_template(
        [QUESTION], add_generation_prompt=False, return_dict=False
    )
    tokenizer = ChatTokenizer(loaded["chatml"])
    prompt = render(tokenizer, continue_final_message=None, add_generation_prompt=False)
    assert list(prompt.token_ids) == theirs


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": None}])
def test_absent_fields_open_a_new_answer(
    loaded: dict[str, PreTrainedTokenizerFast], fields: dict[str, Any]
) -> None:
    theirs = loaded["chatml"].apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=False
    )
    tokenizer = ChatTokenizer(loaded["chatml"])
    assert list(render(tokenizer, continue_final_message=None, **fields).token_ids) == theirs
    assert list(render(tokenizer, continue_final_message=False, **fields).token_ids) == theirs


# ---- thinking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beginning", "opens"),
    [("<think>\n", True), ("", False), ("The tag is <think>", False), ("Well", False)],
)
def test_thinking_that_was_opened(
    loaded: dict[str, PreTrainedTokenizerFast], beginning: str, opens: bool
) -> None:
    prompt = render(ChatTokenizer(loaded["thinking"]), answer(beginning))
    assert prompt.opens_thinking == opens


def test_behind_its_thinking_an_answer_goes_on(
    loaded: dict[str, PreTrainedTokenizerFast],
) -> None:
    tokenizer = ChatTokenizer(loaded["thinking"])
    prompt = render(tokenizer, answer("It is", reasoning_content="17 + 48 = 65"))
    assert tokenizer.decode(prompt.token_ids).endswith("<think>\n17 + 48 = 65\n</think>\n\nIt is")
    assert not prompt.opens_thinking


def test_amid_thinking_it_cannot(loaded: dict[str, PreTrainedTokenizerFast]) -> None:
    """What follows would be told apart from the answer at the wrong place."""
    with pytest.raises(BadRequestError, match="inside a thinking block") as caught:
        render(ChatTokenizer(loaded["thinking"]), answer("<think>\nLet me see"))
    assert caught.value.param == "messages.1.content"
    # Whoever never thinks has only mentioned the tag.
    plain = ChatTokenizer(loaded["trimming"])
    assert not render(plain, answer("<think>\nLet me see")).opens_thinking


def test_a_template_that_drops_the_beginning(tokenizer_folder: Path) -> None:
    """Its refusal does not quote the prompt."""
    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    theirs.chat_template = "{{ messages[0].content }}"
    with pytest.raises(BadRequestError, match="does not appear in the chat") as caught:
        render(ChatTokenizer(theirs), answer("sixty-five"))
    assert "sixty-five" not in str(caught.value)


# ---- refusals ---------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
JSON_FORMAT = {"type": "json_object"}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (body(answer("a"), add_generation_prompt=True), "add_generation_prompt"),
        (body(), "messages.0.role"),
        (body(answer("a"), QUESTION), "messages.2.role"),
        (body(answer(None)), "messages.1.content"),
        (body(answer("a", tool_calls=[CALL])), "messages.1.tool_calls"),
        (body(answer("", reasoning_content="hm")), "messages.1.reasoning_content"),
        (body(answer(" ", reasoning_content="hm")), "messages.1.reasoning_content"),
        (body(answer("a"), tools=[TOOL]), "continue_final_message"),
        (body(answer("a"), response_format=JSON_FORMAT), "continue_final_message"),
        (body(answer("a"), structured_outputs={"regex": "a+"}), "continue_final_message"),
        (body(answer("a"), continue_final_message="yes"), "continue_final_message"),
        (body(answer("a"), add_generation_prompt=0), "add_generation_prompt"),
        (
            body(answer("a"), chat_template_kwargs={"continue_final_message": True}),
            "chat_template_kwargs.continue_final_message",
        ),
    ],
)
@pytest.mark.parametrize("model", ["small", "large", "auto"])
def test_messages_that_cannot_be_continued_are_refused(
    server: Server, http: httpx.Client, wrong: dict[str, Any], param: str, model: str
) -> None:
    response = http.post("/v1/chat/completions", json={**wrong, "model": model})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert not server.engine.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
def test_compatible_options_are_accepted(
    server: Server, http: httpx.Client, fields: dict[str, Any]
) -> None:
    response = http.post("/v1/chat/completions", json=body(answer("Hello"), **fields))
    assert response.status_code == 200, response.text


# ---- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_beginning_is_not_said_again(
    server: Server, http: httpx.Client, loaded: dict[str, PreTrainedTokenizerFast], stream: bool
) -> None:
    server.says(" there, how are you today?")
    asked = body(answer("Hello"), n=2, stream=stream)
    response = http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    if stream:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        texts = [
            "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)
            for index in range(2)
        ]
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert texts == [" there, how are you today?"] * 2
    theirs = loaded["chatml"].apply_chat_template(
        asked["messages"], continue_final_message=True, return_dict=False
    )
    assert [list(r.prompt_token_ids) for r in server.engine.submitted] == [theirs] * 2


@pytest.fixture(scope="module")
def pair_url() -> Iterator[str]:
    """A gateway on the bundled pair, with its own router."""
    with real_gateway() as url:
        yield url


def complete(url: str, **fields: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "max_tokens": 100, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("model", ["small", "large"])
def test_wherever_it_is_cut_an_answer_goes_on_as_it_went(pair_url: str, model: str) -> None:
    """Between any two tokens, as a gateway does that continues a broken upstream answer."""
    messages = [{"role": "user", "content": "What is 4786 + 3957?"}]
    whole = complete(pair_url, model=model, messages=messages)["choices"][0]["message"]["content"]
    backend = ChatTokenizer(shipped_tokenizer())
    ids = asyncio.run(backend.encode_answer(whole, 100))
    assert len(ids) > 8
    for cut in {1, len(ids) // 3, len(ids) // 2, len(ids) - 1}:
        beginning = backend.decode(ids[:cut])
        rest = complete(
            pair_url,
            model=model,
            messages=[*messages, answer(beginning)],
            continue_final_message=True,
        )
        assert beginning + rest["choices"][0]["message"]["content"] == whole


@pytest.mark.slow
def test_the_cascade_goes_on_too(pair_url: str) -> None:
    """Kept or handed over, it is the answer of the model that gave it, from the same beginning."""
    escalated = set()
    for question, beginning in [
        ("Who are you?", "I am"),
        ("What weekday comes 225 days after a Sunday?", "225"),
        ("What is 4786 + 3957?", "4786 + "),
        ("Reverse the word lamp.", "p"),
        ("How many days are there between June 17 and October 20?", "June"),
    ]:
        messages = [{"role": "user", "content": question}, answer(beginning)]
        asked = {"messages": messages, "continue_final_message": True}
        auto = complete(pair_url, model="auto", **asked)
        alone = complete(pair_url, model=auto["outrider"]["tier"], **asked)
        assert auto["choices"][0]["message"] == alone["choices"][0]["message"]
        escalated.add(auto["outrider"]["escalated"])
    assert escalated == {True, False}
