"""Conversations read as transformers writes them, without transformers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from outrider.gateway.answering.text.chat_template import ChatTemplate
from tests.engines import PAIR_FOLDER

TOOLS = (
    "{{ bos_token }}{% set seen = namespace(n=0) %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% else %}none{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% set seen.n = seen.n + 1 %}"
    "<{{ m.role }} {{ loop.index }}>{{ m['content'] | trim }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% if loop.last %}{% continue %}{% endif %}|{% endfor %}{{ seen.n }}"
    "{% generation %}{{ documents is none }}{% endgeneration %}"
    "{% if add_generation_prompt %}{{ eos_token }}go{% endif %}{{ mood | default('calm') }}"
)
_CHAT = """
import asyncio, sys
sys.modules["transformers"] = None
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
request = ChatRequest.model_validate(
    {"model": "auto", "messages": [{"role": "user", "content": "<|end|>"}]}
)
print(*asyncio.run(ChatTokenizer.load(sys.argv[1]).render_chat(request.messages)).token_ids)
"""
REFUSING = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}ok"
GREEDY = "{% for m in messages %}{% set _ = m.pop('content') %}{% endfor %}"
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hello 漢 {{ 7 * 7 }} <b>&\u2028"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1 and 2."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "3", "name": "add"},
    ],
    [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
        {"role": "user", "content": "I see."},
    ],
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"mood": "glad", "tools": [{"type": "function", "function": {"name": "add"}}]},
]


@pytest.mark.parametrize("template", [None, TOOLS])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("end", ["new_answer", "messages"])
def test_the_same_text_as_transformers(
    tokenizer_folder: Path, template: str | None, talk: Any, variables: dict[str, Any], end: Any
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    theirs = tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=end == "new_answer", **variables
    )
    assert ChatTemplate(tokenizer).text(talk, variables, end) == theirs


@pytest.mark.parametrize("template", [REFUSING, GREEDY])
def test_a_template_refuses_and_changes_nothing(tokenizer_folder: Path, template: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = template
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate(tokenizer).text(talk, {}, "new_answer")
    assert talk == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.slow
def test_a_chat_needs_no_transformers() -> None:
    """Rendered and encoded, also where a text spells control tokens."""
    folder = PAIR_FOLDER / "large"
    done = subprocess.run(
        [sys.executable, "-c", _CHAT, str(folder)], capture_output=True, text=True, check=True
    )
    talk = [{"role": "user", "content": "<|end|>"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    assert done.stdout.split() == [str(token_id) for token_id in theirs]
