"""openai: chat completions, a stream, a tool, a parsed answer."""

import json
import os

import openai
from pydantic import BaseModel


class Place(BaseModel):
    """The answer's form."""

    city: str


client = openai.OpenAI(base_url=f"{os.environ['OUTRIDER_URL']}/v1", api_key="none")
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

chat = client.chat.completions.create(model="auto", messages=HELLO)
stream = client.chat.completions.create(model="auto", messages=HELLO, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
asked = [{"role": "user", "content": "Weather in Oslo?"}]
called = client.chat.completions.create(model="auto", messages=asked, tools=[WEATHER])
(call,) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Oslo"}
result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
turns = [*asked, called.choices[0].message, result]
told = client.chat.completions.create(model="auto", messages=turns, tools=[WEATHER])
parsed = client.chat.completions.parse(model="auto", messages=HELLO, response_format=Place)
print(
    json.dumps(
        {
            "chat": chat.choices[0].message.content,
            "stream": streamed,
            "tool": told.choices[0].message.content,
            "object": parsed.choices[0].message.parsed.model_dump(),
        }
    )
)
