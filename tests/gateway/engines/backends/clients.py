"""Engine clients that are started and ended, and what they answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from outrider.engine.events import EngineEvent, TokensEmitted
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from tests.gateway import scripted_engine
from tests.gateway.scripted_engine import make_request

BUILDER = "tests.gateway.scripted_engine:build"


Client = TypeVar("Client", bound=EngineClient)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def with_limit() -> None:
        async with asyncio.timeout(120):
            await main

    asyncio.run(with_limit())


@asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request_id: str, **options: Any) -> list[EngineEvent]:
    return [event async for event in client.submit(make_request(request_id, **options))]


def tokens(events: list[EngineEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokensEmitted) for t in event.token_ids]


STEP_MS = '{"step_s": 0.001}'


def in_process(arguments: str = "{}") -> InProcessEngineClient:
    return InProcessEngineClient(lambda report: scripted_engine.build(arguments, report))


def process(arguments: str = "{}", **patience: Any) -> ProcessEngineClient:
    recipe = EngineRecipe(builder=BUILDER, arguments=arguments)
    return ProcessEngineClient(recipe, policy=ReconnectPolicy(**patience))


MakeClient = Callable[[str], InProcessEngineClient | ProcessEngineClient]


both = pytest.mark.parametrize("make_client", [in_process, process])


async def becomes(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - no event is set by what is waited for
            await asyncio.sleep(0.005)
