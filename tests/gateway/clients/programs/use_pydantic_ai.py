"""pydantic-ai: a run, a stream, a tool, a typed answer."""

import asyncio
import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    """The answer's form."""

    city: str


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return "7 degrees"


async def main() -> None:
    """Run agents."""
    provider = OpenAIProvider(base_url=f"{os.environ['OUTRIDER_URL']}/v1", api_key="none")
    model = OpenAIChatModel("auto", provider=provider)
    plain = Agent(model)
    async with plain.run_stream("Hello") as stream:
        streamed = await stream.get_output()
    chat = await plain.run("Hello")
    told = await Agent(model, tools=[get_weather]).run("Weather in Oslo?")
    typed = await Agent(model, output_type=Place).run("Hello")
    print(
        json.dumps(
            {
                "chat": chat.output,
                "stream": streamed,
                "tool": told.output,
                "object": typed.output.model_dump(),
            }
        )
    )


asyncio.run(main())
