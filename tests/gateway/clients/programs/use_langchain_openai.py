"""langchain-openai: invoke, stream, bind_tools, with_structured_output."""

import json
import os

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """The answer's form."""

    city: str


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return "7 degrees"


model = ChatOpenAI(model="auto", base_url=f"{os.environ['OUTRIDER_URL']}/v1", api_key="none")
asked = HumanMessage("Weather in Oslo?")
with_tools = model.bind_tools([get_weather])
called = with_tools.invoke([asked])
results = [get_weather.invoke(call) for call in called.tool_calls]
print(
    json.dumps(
        {
            "chat": model.invoke("Hello").content,
            "stream": "".join(chunk.content for chunk in model.stream("Hello")),
            "tool": with_tools.invoke([asked, called, *results]).content,
            "object": model.with_structured_output(Place).invoke("Hello").model_dump(),
        }
    )
)
