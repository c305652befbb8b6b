"""Answers in channels, by the real engine: speculation changes nothing, calls are always valid.

The shipped pair under gpt-oss's template, its special tokens renamed to those of the format.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.gateway.settings.sections import bundled_pair
from tests.gateway.conftest import real_gateway

TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}\
{{ messages[0].content }}{{ '<|start|>assistant' }}{# <|channel|>analysis commentary #}"""
NAMES = {
    "<|pad|>": "<|channel|>",
    "<|bos|>": "<|message|>",
    "<|system|>": "<|constrain|>",
    "<|user|>": "<|start|>",
    "<|assistant|>": "<|end|>",
    "<|end|>": "<|return|>",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "plan_trip",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 30},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("pair")
    for tier in ("small", "large"):
        shutil.copytree(bundled_pair() / tier, folder / tier)
        (folder / tier / "chat_template.jinja").write_text(TEMPLATE)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path: Path = folder / tier / name
            pattern = "|".join(map(re.escape, NAMES))
            path.write_text(re.sub(pattern, lambda found: NAMES[found[0]], path.read_text()))
    flags = {f"models.{tier}": str(folder / tier) for tier in ("small", "large")}
    with real_gateway(**flags) as url:
        yield url


def ask(url: str, speculation: str, **fields: Any) -> Any:
    body = {
        "model": "large",
        "messages": [{"role": "user", "content": "What is 47 + 39?"}],
        "max_tokens": 160,
        "logit_bias": {"5": 12},  # <|end|>, which the pair never learnt: its thoughts would not end
        "outrider": {"speculation": speculation},
        **fields,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    for call in choice["message"].get("tool_calls") or []:
        del call["id"]
    return choice


@pytest.mark.slow
def test_calls_in_channels_are_valid_and_the_same_with_speculation(gateway: str) -> None:
    num_calls = 0
    for seed in range(3):
        fields = {"tools": [TOOL], "tool_choice": "required", "seed": seed}
        choice = ask(gateway, "on", **fields)
        assert ask(gateway, "off", **fields) == choice
        if choice["finish_reason"] == "length":
            continue
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert len(arguments["city"]) <= 8
        assert 1 <= arguments["days"] <= 30
        assert choice["message"]["content"] is None
        num_calls += 1
    assert num_calls


@pytest.mark.slow
def test_structured_answers_in_channels_conform(gateway: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    ended = 0
    for seed in range(3):
        choice = ask(gateway, "on", response_format=wanted, seed=seed)
        assert ask(gateway, "off", response_format=wanted, seed=seed) == choice
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"])["n"], int)
            ended += 1
    assert ended
