"""The official anthropic client against a gateway: messages, streams, tools, counts, errors.

    pip install anthropic
    OUTRIDER_KEY=or-... python examples/clients/anthropic_client.py

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000. While it has no keys, none
is needed. LIMITED_KEY, where it is set, is a key that may ask once a minute: the script shows what
its second request is told.
"""

import os
from typing import Any

import anthropic

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("OUTRIDER_KEY", "none")
QUESTION: list[Any] = [{"role": "user", "content": "What is 48 + 37?"}]
ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def say(topic: str, *words: object) -> None:
    """One line of output."""
    print(f"{topic}:", *words)  # noqa: T201


def text_of(message: anthropic.types.Message) -> str:
    """The text of an answer."""
    return "".join(block.text for block in message.content if block.type == "text")


def create(client: anthropic.Anthropic) -> None:
    """A whole answer. The names of models are the gateway's: auto, small, large ..."""
    message = client.messages.create(
        model="auto", system="Be short.", messages=QUESTION, max_tokens=64
    )
    say("message", message.stop_reason, text_of(message))
    say("tokens", message.usage.input_tokens, "in,", message.usage.output_tokens, "out")


def stream(client: anthropic.Anthropic) -> None:
    """The same piece by piece."""
    with client.messages.stream(model="auto", messages=QUESTION, max_tokens=64) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == text_of(final)
    say("stream", final.usage.output_tokens, "tokens,", text)


def tools(client: anthropic.Anthropic) -> None:
    """The model asks for a call, we make it, the model goes on with the result."""
    # "any": a small model may forget that it has tools. A large one does with "auto".
    asked = client.messages.create(
        model="large",
        messages=QUESTION,
        tools=[ADD],
        tool_choice={"type": "any"},
        max_tokens=128,
    )
    results: list[Any] = []
    for block in asked.content:
        if block.type == "tool_use":
            values: Any = block.input
            total = values["a"] + values["b"]
            say("tool", f"{block.name}({values}) = {total}")
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": str(total)})
    last = client.messages.create(
        model="large",
        messages=[
            *QUESTION,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": results},
        ],
        tools=[ADD],
        tool_choice={"type": "none"},
        max_tokens=64,
    )
    say("after the tool", text_of(last))


def count(client: anthropic.Anthropic) -> None:
    """Count the tokens of a prompt exactly; nothing is generated."""
    counted = client.messages.count_tokens(model="large", messages=QUESTION)
    say("prompt", counted.input_tokens, "tokens")


def limits(client: anthropic.Anthropic) -> None:
    """Read the rest of the key's limits from the headers."""
    raw = client.messages.with_raw_response.create(model="auto", messages=QUESTION, max_tokens=8)
    for name in ("limit", "remaining", "reset"):
        say(f"x-ratelimit-{name}-tokens", raw.headers.get(f"x-ratelimit-{name}-tokens"))
    say("request id", raw.headers["request-id"].split("-")[0])


def errors(client: anthropic.Anthropic) -> None:
    """Every failure is the client's own exception class."""
    stranger = client.with_options(api_key="or-nobody00" + "x" * 43)
    for name, asker, model in (
        ("authentication", stranger, "auto"),
        ("not found", client, "no-such-model"),
    ):
        try:
            asker.messages.create(model=model, messages=QUESTION, max_tokens=8)
        except anthropic.APIStatusError as error:
            body: Any = error.body
            say(name, type(error).__name__, error.status_code, body["error"]["type"])
        else:
            say(name, "was answered")
    if limited_key := os.environ.get("LIMITED_KEY"):
        limited = client.with_options(api_key=limited_key, max_retries=0)
        try:
            for _ in range(2):
                limited.messages.create(model="auto", messages=QUESTION, max_tokens=8)
        except anthropic.RateLimitError as error:
            wait_s = error.response.headers["retry-after"]
            say("rate limit", type(error).__name__, "again in", wait_s, "s")


def main() -> None:
    """All of it, in turn."""
    with anthropic.Anthropic(base_url=URL, api_key=KEY) as client:
        for part in (create, stream, tools, count, limits, errors):
            part(client)


if __name__ == "__main__":
    main()
