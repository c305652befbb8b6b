"""The fields about thinking reach the engine as a budget, or are named as ignored."""

from collections.abc import Callable
from typing import Any, Final

import httpx
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from outrider.gateway.answering.jobs.prompts import chat_prompt
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import GRANITE, THINK
from outrider.gateway.answering.text.thinking_marks import spell_marks
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.wiring.application import build_app
from outrider.verifier.params import ThinkingBudget
from tests.gateway.conftest import TEMPLATE, parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient, Step

IGNORED: Final = "x-outrider-ignored-fields"
HELLO: Final = [{"role": "user", "content": "Hello"}]
HARMONY: Final = TEMPLATE + "{# <|channel|>analysis #}{{ reasoning_effort }}"
READS: Final = TEMPLATE + "{{ reasoning_effort }}"
PLAIN: Final = TEMPLATE.replace("<think>", "")

Ask = Callable[..., tuple[ThinkingBudget | None, str | None]]


@pytest.fixture
def ask(tokenizer_folder: Any, encode: Callable[[str], list[int]]) -> Ask:
    """Ask a gateway whose models have this template; the engine's budget, and what is ignored."""

    def asked(
        template: str = TEMPLATE, path: str = "chat/completions", **fields: Any
    ) -> tuple[ThinkingBudget | None, str | None]:
        backend = AutoTokenizer.from_pretrained(tokenizer_folder)
        backend.chat_template = template
        answer = [Step(token_ids=tuple(encode("Hello")))]
        engine = ScriptedClient(
            vocab_size=420, max_context=4096, script=lambda _: Script(steps=answer)
        )
        usual = {} if "input" in fields else {"max_tokens": 5, "messages": HELLO}
        document = {"model": "large", **usual, **fields}
        with running(build_app(parts_over(engine, ChatTokenizer(backend)))) as url:
            response = httpx.post(f"{url}/v1/{path}", json=document, timeout=20)
        assert response.status_code == 200, response.text
        return engine.submitted[-1].sampling.thinking, response.headers.get(IGNORED)

    return asked


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": 0, "reasoning_effort": "low"}, 0),
        ({"thinking_token_budget": -1, "reasoning_effort": "low"}, None),
        ({"thinking_token_budget": None, "reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "minimal"}, 512),
        ({"reasoning_effort": "medium"}, 8192),
        ({"reasoning_effort": "high"}, None),
        ({"chat_template_kwargs": {"thinking_budget": 3}, "reasoning_effort": "low"}, 3),
        ({"chat_template_kwargs": {"thinking_budget": True}}, None),
    ],
)
def test_fields_of_a_chat_are_a_budget(ask: Ask, fields: dict[str, Any], most: int | None) -> None:
    budget, ignored = ask(**fields)
    assert ignored is None
    assert (None if budget is None else budget.max_tokens) == most


@pytest.mark.slow
def test_other_apis_say_it_in_their_words(ask: Ask) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1500}
    budget, _ = ask(path="messages", thinking=thinking)
    assert budget is not None
    assert (budget.max_tokens, budget.opens) == (1500, ())
    budget, _ = ask(path="responses", input="Hello", reasoning={"effort": "low"})
    assert budget is not None
    assert budget.max_tokens == 1024
    assert ask(PLAIN, "messages", thinking=thinking) == (None, "thinking_budget")


@pytest.mark.slow
def test_what_a_model_has_no_use_for_is_named(ask: Ask) -> None:
    assert ask(PLAIN, thinking_token_budget=7) == (None, "thinking_token_budget")
    assert ask(PLAIN, reasoning_effort="low") == (None, "reasoning_effort")
    assert ask(HARMONY, thinking_token_budget=7) == (None, "thinking_token_budget")
    for other in ("huge", 5, ["low"]):
        assert ask(reasoning_effort=other) == (None, "reasoning_effort")
    assert ask(READS, reasoning_effort="low") == (None, None)
    assert ask(PLAIN, thinking_token_budget=-1) == (None, None)


@pytest.mark.slow
def test_an_answer_that_goes_on_does_not_think(ask: Ask) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask(thinking_token_budget=7, messages=begun, **more) == (None, None)


@pytest.mark.parametrize(
    ("template", "effort", "read"),
    [
        (READS, "none", "none"),
        (READS, "huge", ""),
        (HARMONY, "none", "low"),
        (HARMONY, "medium", "medium"),
        (HARMONY, "max", "high"),
    ],
)
async def test_a_template_that_reads_the_effort_gets_it(
    tokenizer_folder: Any, template: str, effort: str, read: str
) -> None:
    backend = AutoTokenizer.from_pretrained(tokenizer_folder)
    backend.chat_template = template
    request = ChatRequest(model="large", messages=HELLO, reasoning_effort=effort)
    tokenizer = ChatTokenizer(backend)
    prompt = await chat_prompt(request, tokenizer)
    assert tokenizer.decode(prompt.token_ids).rpartition("assistant\n")[2].split() == read.split()


@pytest.mark.parametrize("form", [THINK, GRANITE])
def test_marks_have_all_their_spellings(
    tokenizer_folder: Any, encode: Callable[[str], list[int]], form: Any
) -> None:
    backend = AutoTokenizer.from_pretrained(tokenizer_folder).backend_tokenizer
    marks = spell_marks(backend, form)
    assert backend.decode(list(marks.closes[0])) == form.close
    for mark in form.closes:
        for text in (f"So.\n{mark}\n\nHello", f"So {mark}Hello", f"So.{mark}\nHello"):
            ids = encode(text)
            pieces = {tuple(ids[i:j]) for i in range(len(ids)) for j in range(i, len(ids) + 1)}
            assert pieces & {*marks.closes}, text
    for mark in form.opens:
        for text in (f"{mark}\nSo", f"\n\n{mark}So"):
            ids = encode(text)
            assert any(tuple(ids[:end]) in marks.opens for end in range(len(ids))), text


def test_a_mark_of_one_token_has_one_spelling(tokenizer_folder: Any) -> None:
    backend = AutoTokenizer.from_pretrained(tokenizer_folder).backend_tokenizer
    backend.add_tokens([AddedToken(THINK.close, special=False)])
    assert spell_marks(backend, THINK).closes == ((backend.token_to_id(THINK.close),),)
