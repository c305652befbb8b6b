"""openai-agents over the Responses API: a run, a stream, a tool, a typed answer."""

import asyncio
import json
import os

from agents import (
    Agent,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """The answer's form."""

    city: str


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return "7 degrees"


async def main() -> None:
    """Run agents."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['OUTRIDER_URL']}/v1", api_key="none")
    model = OpenAIResponsesModel(model="auto", openai_client=client)
    plain = Agent(name="plain", model=model)
    chat = await Runner.run(plain, "Hello")
    streaming = Runner.run_streamed(plain, "Hello")
    async for _ in streaming.stream_events():
        pass
    told = await Runner.run(
        Agent(name="tools", model=model, tools=[get_weather]), "Weather in Oslo?"
    )
    typed = await Runner.run(Agent(name="typed", model=model, output_type=Place), "Hello")
    print(
        json.dumps(
            {
                "chat": chat.final_output,
                "stream": streaming.final_output,
                "tool": told.final_output,
                "object": typed.final_output.model_dump(),
            }
        )
    )


asyncio.run(main())
