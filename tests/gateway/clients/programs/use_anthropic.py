"""anthropic: a message, a stream, a tool, an answer with a schema."""

import json
import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["OUTRIDER_URL"], api_key="none")
HELLO = {"model": "auto", "max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "input_schema": SCHEMA}

chat = client.messages.create(**HELLO)
with client.messages.stream(**HELLO) as stream:
    streamed = "".join(stream.text_stream)
asked = {"role": "user", "content": "Weather in Oslo?"}
fields = {"model": "auto", "max_tokens": 256, "tools": [WEATHER]}
called = client.messages.create(**fields, messages=[asked])
(call,) = (block for block in called.content if block.type == "tool_use")
assert call.input == {"city": "Oslo"}
result = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"}
turns = [
    asked,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
told = client.messages.create(**fields, messages=turns)
form = {"format": {"type": "json_schema", "schema": SCHEMA}}
formed = client.messages.create(**HELLO, output_config=form)
print(
    json.dumps(
        {
            "chat": chat.content[0].text,
            "stream": streamed,
            "tool": told.content[0].text,
            "object": json.loads(formed.content[0].text),
        }
    )
)
