"""The setting that names the field of a chat's thinking."""

import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.kinds import ReasoningField
from outrider.gateway.contract.schema.responses import ChatCompletion
from outrider.gateway.wiring.application import build_app
from tests.gateway.answers import read_answer
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient, Step


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
def test_thinking_comes_back_under_its_name(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    field: ReasoningField,
    names: set[str],
) -> None:
    steps = [Step(token_ids=(each,)) for each in encode("<think>I see</think>Yes")]
    engine = ScriptedClient(vocab_size=420, script=lambda _: Script(steps=steps))
    parts = replace(parts_over(engine, tokenizer), reasoning_field=field)
    body = {"model": "large", "messages": [{"role": "user", "content": "Hi"}]}
    with running(build_app(parts)) as url, httpx.Client(base_url=f"{url}/v1") as http:
        whole = http.post("/chat/completions", json=body)
        stream = http.post("/chat/completions", json={**body, "stream": True}).text
        answer = http.post("/responses", json={"model": "large", "input": "Hi"}).json()
    read_answer(ChatCompletion, whole.content)
    message = whole.json()["choices"][0]["message"]
    assert message["content"] == "Yes"
    assert {name: message[name] for name in message if name.startswith("reasoning")} == (
        dict.fromkeys(names, "I see")
    )
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        told = "".join(delta.get(name, "") for delta in deltas)
        assert told == ("I see" if name in names else "")
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
