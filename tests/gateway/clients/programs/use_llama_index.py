"""llama-index: complete, stream, a tool, a structured answer."""

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "7 degrees"


model = OpenAILike(
    model="auto",
    api_base=f"{os.environ['OUTRIDER_URL']}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
)
tool = FunctionTool.from_defaults(get_weather)
hello = [ChatMessage(role="user", content="Hello")]
asked = [ChatMessage(role="user", content="Weather in Oslo?")]
called = model.chat_with_tools([tool], chat_history=asked)
(call,) = model.get_tool_calls_from_response(called)
assert call.tool_kwargs == {"city": "Oslo"}
result = ChatMessage(
    role="tool", content="7 degrees", additional_kwargs={"tool_call_id": call.tool_id}
)
told = model.chat_with_tools([tool], chat_history=[*asked, called.message, result])
form = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
formed = model.chat(hello, response_format=form)
print(
    json.dumps(
        {
            "chat": model.chat(hello).message.content,
            "stream": "".join(part.delta or "" for part in model.stream_chat(hello)),
            "tool": told.message.content,
            "object": json.loads(formed.message.content),
        }
    )
)
