"""Hole 4: variables of chat templates, on every path that renders one or sends them on."""

import inspect
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.gateway.answering.text.chat_template import ChatTemplate
from outrider.gateway.answering.text.token_counts import TokenCounter
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.template_variables import RESERVED, read_variables
from outrider.gateway.upstream.call import UpstreamCall
from tests.gateway.conftest import OpenWorld

FREEZE = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x"
WORDS = [{"role": "user", "content": "word " * 1000}]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False, "thinking_budget": 2048, "temperature": 0.5},
        {"date_string": "22 Nov 2026", "builtin_tools": ["search", "python"], "none": None},
    ],
)
def test_plain_variables_pass(variables: dict[str, Any]) -> None:
    assert read_variables(variables) == variables


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        ([1], "chat_template_kwargs"),
        ({f"v{i}": 1 for i in range(33)}, "chat_template_kwargs"),
        ({"chat_template": FREEZE}, "chat_template_kwargs.chat_template"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"eos_token": "x"}, "chat_template_kwargs.eos_token"),
        ({"range": 1}, "chat_template_kwargs.range"),
        ({"a": "x" * 1025}, "chat_template_kwargs.a"),
        ({"a": ["x" * 600] * 2}, "chat_template_kwargs.a"),
        ({"a": [1] * 65}, "chat_template_kwargs.a"),
        ({"a": [[1]]}, "chat_template_kwargs.a"),
        ({"a": {"b": 1}}, "chat_template_kwargs.a"),
        ({"a": 10**400}, "chat_template_kwargs.a"),
        ({"n" * 65: 1}, f"chat_template_kwargs.{'n' * 64}..."),
    ],
)
def test_other_variables_are_refused_by_name(variables: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_variables(variables)
    assert caught.value.param == param


def test_every_option_and_control_token_of_a_tokenizer_is_reserved(tokenizer_folder: Any) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    options = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}
    reserved = options | ChatTemplate(tokenizer).special_tokens.keys()
    assert {"tokenize", "chat_template", "eos_token"} <= reserved
    assert reserved <= RESERVED, "tiers on other machines are checked without their tokenizer"


class Upstream:
    """A counter whose template renders are recorded."""

    def __init__(self, folder: Any, source: str | None = None) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        if source is not None:
            tokenizer.chat_template = source
        self.rendered: list[dict[str, Any]] = []
        self._counter = TokenCounter(tokenizer)
        template: Any = self._counter._template
        render = template.text

        def recorded(messages: Any, variables: Any, end: Any) -> Any:
            self.rendered.append(variables)
            return render(messages, variables, end)

        template.text = recorded

    def count(self, messages: Any = WORDS, **document: Any) -> int | None:
        """The tokens of a chat; None where they are not counted."""
        call = UpstreamCall(
            endpoint="chat",
            document={"messages": messages, **document},
            model="m",
            request_id="r",
            arrival_s=0.0,
        )
        return self._counter.count_prompt(call)


@pytest.mark.parametrize("template", [FREEZE, "x"])
def test_a_client_cannot_replace_the_template_of_a_count(
    tokenizer_folder: Any, template: str
) -> None:
    upstream = Upstream(tokenizer_folder)
    assert upstream.count(chat_template_kwargs={"chat_template": template}) is None
    assert not upstream.rendered, "nothing was rendered"


def test_a_variable_never_lowers_a_count(tokenizer_folder: Any) -> None:
    template = "{% if brief %}x{% else %}{{ messages[0].content }}{% endif %}{{ more or '' }}"
    upstream = Upstream(tokenizer_folder, template)
    plain = upstream.count()
    more = upstream.count(chat_template_kwargs={"more": "and more of it"})
    assert plain is not None
    assert more is not None
    assert more > plain
    assert upstream.count(chat_template_kwargs={"brief": True}) is None


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "reasoning_content": "y" * 40_000}],
        [{"role": "user", "content": "x", "deep": {"a": ["y" * 40_000]}}],
        [{"role": "user", "content": ""}] * 1025,
    ],
)
def test_a_count_has_bounds_on_all_that_a_template_is_given(
    tokenizer_folder: Any, messages: Any
) -> None:
    upstream = Upstream(tokenizer_folder)
    assert upstream.count(messages) is None
    assert not upstream.rendered


def test_prompts_of_a_batch_are_bounded_together(tokenizer_folder: Any) -> None:
    upstream = Upstream(tokenizer_folder)._counter
    call = UpstreamCall(
        endpoint="completion",
        document={"prompt": ["x" * 20_000] * 2},
        model="m",
        request_id="r",
        arrival_s=0.0,
    )
    assert upstream.count_prompt(call) is None


def test_variables_are_refused_in_front_of_every_tier(open_world: OpenWorld) -> None:
    with open_world(tier={"server": "vllm"}) as world:
        for model in ("cloud", "small", "auto"):
            refused = world.chat(model=model, chat_template_kwargs={"chat_template": FREEZE})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "chat_template_kwargs.chat_template"
        assert not world.cloud.requests
        assert world.chat(model="cloud", chat_template_kwargs={"a": True}).status_code == 200
