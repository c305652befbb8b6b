"""Hole 6: between two passes over a long body other requests run, on every API."""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import World

NUM_PARTS = 1_000
API = "outrider.gateway.http.apis.reading"
READING = "outrider.gateway.answering.reading.reading"
OF_ANY_API = (
    f"{API}.validate",
    f"{API}.refuse_doubled_names",
    f"{READING}.read_request",
    f"{READING}.refuse_doubled_names",
    f"{READING}.refuse_misplaced_options",
    f"{READING}.read_known",
)
OF_CHAT = OF_ANY_API[2:]
RESPONSES = "outrider.gateway.http.apis.responses.api"
MESSAGES = "outrider.gateway.http.apis.messages.api"


@pytest.fixture(scope="module")
def world(open_world: OpenWorld) -> Iterator[World]:
    """A gateway with local models and an upstream tier."""
    with open_world() as made:
        yield made


def parts(kind: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": "x" * 40}] * NUM_PARTS


@pytest.mark.parametrize(
    ("path", "fields", "passes"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": parts("text")}]},
            OF_CHAT,
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": parts("input_text")}]},
            (
                *OF_ANY_API,
                f"{RESPONSES}.refuse_misplaced_options",
                f"{RESPONSES}.chat_document",
            ),
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": parts("text")}]},
            (*OF_ANY_API, f"{MESSAGES}.refuse_misplaced_options", f"{MESSAGES}.chat_fields"),
        ),
    ],
)
def test_each_pass_over_a_long_body_has_a_turn_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    path: str,
    fields: dict[str, Any],
    passes: tuple[str, ...],
) -> None:
    """Passes over 25,000 small values took up to 190 ms in one turn of the event loop."""
    turns: list[int] = []
    num_turns = 0

    def count_turns() -> None:
        nonlocal num_turns
        num_turns += 1
        if len(turns) < len(passes):
            asyncio.get_running_loop().call_soon(count_turns)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if not turns:
                count_turns()
            turns.append(num_turns)
            return function(*given, **named)

        return call

    for name in passes:
        module, _, function = name.rpartition(".")
        found = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(name, counted(found))
    response = world.http.post(path, json={"model": "auto", **fields})
    assert response.status_code in (200, 400), response.text  # longer than the model's context
    assert len(turns) == len(passes)
    assert len(set(turns)) == len(turns), f"two passes in one turn: {turns}"
