"""A budget of thinking holds together with a grammar, and gives way where they disagree.

What it does to an answer without a grammar is one of the options of test_options_law.py.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.verifier.params import ThinkingBudget, Tier
from tests.engines import heldout_prompts, make_request, shipped_pair, shipped_tokenizer
from tests.grammars import shipped_compiler, text_of
from tests.laws.gateways import Gateway, gateway
from tests.laws.same_answers import Way, assert_same_answers, by, few_blocks

COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}
CLOSE = tuple(shipped_tokenizer().encode("</think>", add_special_tokens=False))
THINKING = re.compile(r"([^<]*)</think>(yes|no)")
BUDGETS = (0, 1, 7, 20)


def under(pattern: str, budgets: tuple[int, ...] = BUDGETS) -> list[EngineRequest]:
    """A greedy and a sampled request with each budget, under a grammar."""
    prompts = heldout_prompts(2, seed=6)
    return [
        replace(
            make_request(
                f"{most}/{number}",
                prompt,
                max_tokens=40,
                seed=most,
                temperature=1.1 * number,
                thinking=ThinkingBudget(max_tokens=most, opens=(), closes=(CLOSE,)),
            ),
            grammar=GrammarSpec(kind="regex", text=pattern),
        )
        for most in budgets
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
def test_thinking_ends_within_its_budget_and_the_answer_conforms() -> None:
    requests = under(THINKING.pattern)
    ways = (few_blocks(requests, spare=4), Way(resume=lambda n, length: n % length), Way())
    for way in ways:
        vary = by(grammars=COMPILERS) | way
        answers = assert_same_answers(requests, of=shipped_pair(), vary=vary).answers
    nums = []
    for request in requests:
        token_ids = answers[request.request_id].token_ids
        assert THINKING.fullmatch(text_of(token_ids[:-1]))
        nums.append(next(n for n in range(len(token_ids)) if _begins(token_ids[n:], CLOSE)))
        assert request.sampling.thinking is not None
        assert nums[-1] <= request.sampling.thinking.max_tokens
    assert max(nums) > 1


def _begins(token_ids: list[int], mark: tuple[int, ...]) -> bool:
    return tuple(token_ids[: len(mark)]) == mark


@pytest.mark.slow
def test_a_grammar_wins() -> None:
    requests = under(r"(yes|no), [a-z ]{8}", budgets=(0, 2))
    free = [replace(each, sampling=replace(each.sampling, thinking=None)) for each in requests]
    vary = by(grammars=COMPILERS)
    right = assert_same_answers(free, of=shipped_pair(), vary=vary).answers
    assert_same_answers(requests, of=shipped_pair(), vary=vary, right=right)


# ---- through the gateway ---------------------------------------------------------------------

TEMPLATE = """\
{%- for message in messages %}{{ message.content }}
{% endfor %}<think>
"""
CHAT = {"messages": [{"role": "user", "content": "What is 48 + 37?"}], "max_tokens": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The bundled pair under a template that has it think, which it never ends by itself."""
    template = tmp_path_factory.mktemp("template") / "thinks.jinja"
    template.write_text(TEMPLATE)
    with gateway({"models.chat_template": str(template)}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("model", ["small", "large"])
@pytest.mark.parametrize("most", [0, 1, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_usage_keeps_to_the_budget(
    served: Gateway, model: str, most: int, temperature: float
) -> None:
    answers = []
    for speculation in ("on", "off"):
        document = {
            **CHAT,
            "model": model,
            "seed": 5,
            "temperature": temperature,
            "thinking_token_budget": most,
            "ignore_eos": True,
            "return_token_ids": True,
            "outrider": {"speculation": speculation},
        }
        answer = served.http.post("/v1/chat/completions", json=document).json()
        (choice,) = answer["choices"]
        assert _begins(choice["token_ids"][most:], CLOSE)
        assert choice["message"]["content"]
        # A line's end behind the mark that opens is not told.
        num_thinking = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert num_thinking in ({0, most} if most <= 1 else {most})
        answers.append(choice)
    assert answers[0] == answers[1]
