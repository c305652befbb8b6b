"""A kill -9 of the engine in the middle of many answers: each is what it would have been.

The shipped pair in a process of its own; requests of every kind run together, and the engine ends
when so many tokens have left it. Clients see a pause: no error, no token twice, and the usage of an
undisturbed answer.
"""

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.settings.tree import load_settings
from outrider.router.policy import NO_CONSTRAINTS, Route, RouteConstraints
from outrider.router.watch import WatchPlan
from tests.gateway.watches import PlannedWatch
from tests.laws.gateways import ENGINE, gateway

CHAT: Final = "/v1/chat/completions"
SCHEMA: Final = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "number": {"type": "integer"}},
    "required": ["word", "number"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {"name": "look_up", "parameters": SCHEMA, "strict": True},
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"model": "large", "temperature": 0},
    "sampled": {"model": "large", "temperature": 0.9},
    "small": {"model": "small", "temperature": 0.9},
    "penalties": {
        "model": "large",
        "temperature": 0.8,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "logit_bias": {"18": -20},
    },
    "grammar": {
        "model": "large",
        "temperature": 0.7,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
        },
    },
    "tools": {"model": "large", "tools": [TOOL], "tool_choice": "required", "temperature": 0.5},
    "logprobs": {"model": "large", "temperature": 0.8, "logprobs": True, "top_logprobs": 3},
    "choices": {"model": "large", "temperature": 1.0, "n": 3},
    "cascade": {
        "model": "large",
        "temperature": 0.8,
        "outrider": {"quality": {"cascade": 0.3}},
    },
    "escalated": {
        "model": "auto",
        "temperature": 0.8,
        "outrider": {"hold_back_ms": 60_000},
    },
}


@dataclass(frozen=True)
class Escalating:
    """A router whose watches give every small answer up behind its sixth token."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        plan = WatchPlan(new_watch=lambda: PlannedWatch("escalate", at=6))
        watch = plan if constraints.may_watch else None
        return Route(tier="small", reason="test", quality=0.4, watch=watch, is_own=True)


def body(kind: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Tell me about {kind} boats, and why."}],
        "max_tokens": 28,
        "seed": 21,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[kind],
    }


@dataclass(frozen=True)
class Said:
    """All of an answer that does not depend on the time. By choice: text, calls, tokens, end."""

    choices: dict[int, tuple[str, str, tuple[str, ...], str]]
    usage: dict[str, Any]


def said(answer: httpx.Response) -> Said:
    assert answer.status_code == 200, answer.text
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events[-1] == "[DONE]", answer.text
    texts: dict[int, list[str]] = defaultdict(list)
    calls: dict[int, list[str]] = defaultdict(list)
    tokens: dict[int, list[str]] = defaultdict(list)
    ends: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for document in map(json.loads, events[:-1]):
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            index, delta = choice["index"], choice["delta"]
            texts[index].append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                calls[index].append((function.get("name") or "") + (function["arguments"] or ""))
            entries = (choice.get("logprobs") or {}).get("content") or ()
            tokens[index] += [entry["token"] for entry in entries]
            if choice["finish_reason"]:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    choices = {
        index: ("".join(texts[index]), "".join(calls[index]), tuple(tokens[index]), ends[index])
        for index in texts
    }
    # What was cached and drafted depends on the company; the tokens do not.
    return Said(choices, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")})


def ask_all(url: str) -> dict[str, Said]:
    """All kinds at once."""

    def ask(kind: str) -> Said:
        return said(httpx.post(f"{url}{CHAT}", json=body(kind), timeout=120))

    with ThreadPoolExecutor(len(KINDS)) as pool:
        return dict(zip(KINDS, pool.map(ask, KINDS), strict=True))


def check_kills(folder: Path, moments: tuple[int, ...], **flags: Any) -> None:
    """Kill when so many tokens have left, for each of the numbers."""
    settings = load_settings(
        flags={**ENGINE, "engine.process": True, **flags}, environ={}, config_file=None
    )
    armed = folder / "armed"
    arguments = json.dumps({"settings": settings.model_dump_json(), "armed": str(armed)})
    recipe = EngineRecipe(builder="tests.laws.mortal_engine:build", arguments=arguments)
    client = ProcessEngineClient(recipe)
    with gateway(policy=Escalating(), client=client) as made:
        right = ask_all(made.url)
        assert right["escalated"].choices[0][0]
        assert right["tools"].choices[0][1]
        for num_tokens in moments:
            pid = client.pid
            armed.write_text(f"emitted {num_tokens}", encoding="utf-8")
            assert ask_all(made.url) == right
            assert client.pid != pid
            assert not armed.exists()


def test_answers_go_on_when_their_engine_is_killed(tmp_path: Path) -> None:
    check_kills(tmp_path, (90,))


@pytest.mark.slow
def test_answers_go_on_whenever_their_engine_is_killed(tmp_path: Path) -> None:
    check_kills(tmp_path, (1, 30, 150, 200))


@pytest.mark.slow
def test_answers_go_on_in_bfloat16_too(tmp_path: Path) -> None:
    """Deterministic: byte-equal."""
    bfloat16 = {"engine.dtype": "bfloat16", "engine.deterministic": True}
    check_kills(tmp_path, (40, 120), **bfloat16)
