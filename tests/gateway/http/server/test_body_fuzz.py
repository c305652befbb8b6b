"""Bodies broken at random, on every endpoint that reads one: an answer or a 4xx, never a 5xx."""

import json
import random
from copy import deepcopy
from typing import Any

import httpx
import pytest

from benchmarks.chaos.fuzzed_schemas import random_schema
from tests.gateway.conftest import Server
from tests.sizes import repeats

CHAT: dict[str, Any] = {
    "model": "auto",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ],
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["x"],
    "seed": 1,
    "logit_bias": {"5": 1},
    "metadata": {"k": "v"},
    "outrider": {"tier": "small", "max_draft_nodes": 4, "privacy": "private"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "auto", "prompt": ["hi", "there"], "max_tokens": 4},
    "/v1/responses": {
        "model": "auto",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "max_output_tokens": 16,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "auto",
        "max_tokens": 4,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    },
    "/v1/responses/input_tokens": {"model": "auto", "input": "hi", "instructions": "Be brief."},
    "/api/chat": {
        "model": "auto",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 4, "stop": ["a"]},
        "stream": False,
    },
    "/api/generate": {"model": "auto", "prompt": "hi", "options": {"num_predict": 4}, "raw": True},
    "/infill": {
        "input_prefix": "hi",
        "input_suffix": "there",
        "input_extra": [{"filename": "a", "text": "b"}],
        "n_predict": 4,
    },
    "/api/show": {"model": "auto"},
    "/v1/messages/count_tokens": {"model": "auto", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/route": CHAT,
    "/v1/tokenize": {"model": "auto", "prompt": "hi"},
    "/v1/detokenize": {"model": "auto", "tokens": [1, 2, 3]},
    "/v1/feedback": {"request_id": "x", "score": 1},
}
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 3, 2.5, 1e308, 10**400, "", "a", "auto", "\x00", "\ud800", "é" * 200, [], {},
    [[]], [{}], [None] * 300, {"a": {"b": {"c": []}}}, {"type": "text"}, {"role": "user"},
    {"$ref": "#"}, "{{ messages }}", "<|im_start|>", {"privacy": "private"}, ["x"] * 40,
)  # fmt: skip
NAMES = (
    "stream", "n", "response_format", "structured_outputs", "tool_choice", "prediction", "logprobs",
    "top_logprobs", "chat_template_kwargs", "chat_template", "outrider", "privacy", "user", "input",
    "tools", "messages", "prompt", "type", "content", "role", "tool_calls", "thinking", "model",
)  # fmt: skip


def places(value: Any) -> list[dict[str, Any] | list[Any]]:
    """Every object and list in a document, itself first."""
    inside = value.values() if isinstance(value, dict) else value
    nested = [place for item in inside if isinstance(item, dict | list) for place in places(item)]
    return [value, *nested]


def broken(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with up to three odd values, names or bytes."""
    document = deepcopy(body)
    for _ in range(rng.randint(0, 3)):
        place = rng.choice(places(document))
        value = deepcopy(rng.choice(ODD))
        if rng.random() < 0.1:  # a schema, a tool
            value = {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": random_schema(rng)},
            }
        if isinstance(place, list):
            place.insert(rng.randint(0, len(place)), value)
        elif place and rng.random() < 0.5:
            place[rng.choice(list(place))] = value
        else:
            place[rng.choice(NAMES)] = value
    text = json.dumps(document, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    match rng.randrange(8):
        case 0:
            place_ = rng.randrange(len(text))
            text = text[:place_] + rng.randbytes(1) + text[place_ + 1 :]
        case 1:
            text = text[: rng.randrange(len(text))]
        case 2:
            text = text[:-1] + b"," + text[1:]
        case _:
            pass
    return text


def fuzz(server: Server, http: httpx.Client, *, count: int, seed: int) -> None:
    """Send broken bodies to all endpoints in turn; whole ones are answered in between."""
    rng = random.Random(seed)
    server.says("ok")
    statuses: dict[int, int] = {}
    headers = {"content-type": "application/json"}
    for number in range(count):
        path = list(BODIES)[number % len(BODIES)]
        content = broken(rng, BODIES[path])
        response = http.post(path, content=content, headers=headers)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        is_late = response.status_code == 504  # a deadline that the body asked for
        assert response.status_code < 500 or is_late, (path, content[:2000], response.text[:300])
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error if isinstance(error, str) else error["message"], (path, content[:2000])
            assert len(response.content) < 4096, (path, content[:2000])
        if number % 50 == 0:
            whole = http.post("/v1/chat/completions", json=CHAT)
            assert whole.status_code == 200, whole.text
    assert statuses.get(200, 0) > count / 10, statuses
    assert statuses.get(400, 0) > count / 4, statuses


def test_broken_bodies_are_answered_or_refused(server: Server, http: httpx.Client) -> None:
    fuzz(server, http, count=repeats(1000, 200), seed=1)


@pytest.mark.long
def test_many_broken_bodies_are_answered_or_refused(server: Server, http: httpx.Client) -> None:
    fuzz(server, http, count=100_000, seed=2)
