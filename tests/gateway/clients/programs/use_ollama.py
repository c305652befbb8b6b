"""ollama: chat, a stream, a tool, an answer with a schema."""

import json
import os

import ollama
from pydantic import BaseModel


class Place(BaseModel):
    """The answer's form."""

    city: str


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "7 degrees"


client = ollama.Client(host=os.environ["OUTRIDER_URL"])
HELLO = [{"role": "user", "content": "Hello"}]
chat = client.chat(model="auto", messages=HELLO)
streamed = "".join(part.message.content for part in client.chat("auto", HELLO, stream=True))
asked = [{"role": "user", "content": "Weather in Oslo?"}]
called = client.chat(model="auto", messages=asked, tools=[get_weather])
(call,) = called.message.tool_calls
assert dict(call.function.arguments) == {"city": "Oslo"}
result = {"role": "tool", "tool_name": "get_weather", "content": "7 degrees"}
told = client.chat(model="auto", messages=[*asked, called.message, result], tools=[get_weather])
formed = client.chat(model="auto", messages=HELLO, format=Place.model_json_schema())
print(
    json.dumps(
        {
            "chat": chat.message.content,
            "stream": streamed,
            "tool": told.message.content,
            "object": json.loads(formed.message.content),
        }
    )
)
