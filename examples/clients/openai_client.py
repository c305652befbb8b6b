"""The official openai client against a gateway: chat, streams, tools, responses, limits, errors.

    pip install openai
    OUTRIDER_KEY=or-... python examples/clients/openai_client.py

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000. While it has no keys, none
is needed. LIMITED_KEY, where it is set, is a key that may ask once a minute: the script shows what
its second request is told.
"""

import json
import os
from typing import Any

import openai
from pydantic import BaseModel

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("OUTRIDER_KEY", "none")
QUESTION = [{"role": "user", "content": "What is 48 + 37?"}]
TEXT = "Extract a JSON object from the text: Ines lives in Athens and is 41 years old."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """The form of the structured answer."""

    name: str
    city: str
    age: int


def say(topic: str, *words: object) -> None:
    """One line of output."""
    print(f"{topic}:", *words)  # noqa: T201


def checked(text: str | None, right: str) -> str:
    """Return an answer, marked where it is wrong: the models that come with Outrider are toys."""
    return text if text and right in text else f"{text} (wrong: it is {right})"


def chat(client: openai.OpenAI) -> None:
    """A whole answer; `outrider` names the tier that gave it."""
    answer: Any = client.chat.completions.create(
        model="auto", messages=QUESTION, max_tokens=64, temperature=0
    )
    say("chat", checked(answer.choices[0].message.content, "85"))
    say("tier", answer.outrider["tier"], "because", answer.outrider["reason"])


def stream(client: openai.OpenAI) -> None:
    """The same piece by piece, with the usage at the end."""
    chunks = client.chat.completions.create(
        model="auto",
        messages=QUESTION,
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, num_tokens = "", 0
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    say("stream", num_tokens, "tokens,", checked(text, "85"))


def tools(client: openai.OpenAI) -> None:
    """The model asks for a call, we make it, the model goes on with the result."""
    add: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    messages: list[Any] = list(QUESTION)
    # "required": a small model may forget that it has tools. A large one does with "auto".
    asked = client.chat.completions.create(
        model="large",
        messages=messages,
        tools=[add],
        tool_choice="required",
        max_tokens=128,
        temperature=0,
    )
    message = asked.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        total = arguments["a"] + arguments["b"]
        say("tool", f"{call.function.name}({arguments}) = {total}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    last = client.chat.completions.create(
        model="large",
        messages=messages,
        tools=[add],
        tool_choice="none",
        max_tokens=64,
        temperature=0,
    )
    say("after the tool", checked(last.choices[0].message.content, "85"))


def structured(client: openai.OpenAI) -> None:
    """An answer that is JSON of a given form, whatever the model would rather say."""
    # The likeliest: sampled, a number may go on until max_tokens, and be no JSON.
    answer = client.chat.completions.parse(
        model="large",
        messages=[{"role": "user", "content": TEXT}],
        response_format=Person,
        max_tokens=64,
        temperature=0,
    )
    say(
        "structured",
        checked(str(answer.choices[0].message.parsed), "name='Ines' city='Athens' age=41"),
    )


def responses(client: openai.OpenAI) -> None:
    """The Responses API: whole, and as events."""
    whole = client.responses.create(
        model="auto", input="What is 48 + 37?", max_output_tokens=64, temperature=0
    )
    say("response", whole.status, checked(whole.output_text, "85"))
    with client.responses.stream(model="auto", input="What is 6 + 3?", temperature=0) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text
    say("response stream", final.usage and final.usage.output_tokens, "tokens,", checked(text, "9"))


def limits(client: openai.OpenAI) -> None:
    """Read the rest of the key's limits from the headers, and its usage from /v1/usage."""
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=QUESTION, max_tokens=8
    )
    for name in ("limit", "remaining", "reset"):
        say(f"x-ratelimit-{name}-tokens", raw.headers.get(f"x-ratelimit-{name}-tokens"))
    say("completion", raw.parse().id.split("-")[0])
    try:
        used = client.get("/usage", cast_to=dict[str, Any], options={"params": {"by": "tier"}})
    except openai.APIStatusError as error:
        say("usage", error)  # a gateway may keep no books
    else:
        say("usage", used["totals"]["requests"], "requests")


def errors(client: openai.OpenAI) -> None:
    """Every failure is the client's own exception class."""
    stranger = client.with_options(api_key="or-nobody00" + "x" * 43)
    for name, wrong in (
        ("authentication", lambda: stranger.models.list()),
        ("not found", lambda: client.models.retrieve("no-such-model")),
        ("bad request", lambda: client.chat.completions.create(model="auto", messages=[])),
    ):
        try:
            wrong()
        except openai.APIStatusError as error:
            say(name, type(error).__name__, error.status_code, error.code, error.request_id)
        else:
            say(name, "was answered")
    if limited_key := os.environ.get("LIMITED_KEY"):
        limited = client.with_options(api_key=limited_key, max_retries=0)
        try:
            for _ in range(2):
                limited.chat.completions.create(model="auto", messages=QUESTION, max_tokens=8)
        except openai.RateLimitError as error:
            wait_s = error.response.headers["retry-after"]
            say("rate limit", type(error).__name__, error.code, "again in", wait_s, "s")


def main() -> None:
    """All of it, in turn."""
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:
        for part in (chat, stream, tools, structured, responses, limits, errors):
            part(client)


if __name__ == "__main__":
    main()
