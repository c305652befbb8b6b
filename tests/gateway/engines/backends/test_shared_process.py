"""An engine's process that its owner starts, watches and ends, and that other gateways use."""

import os
import signal

from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.spawning import EngineProcess, EngineRecipe
from tests.gateway.engines.backends.clients import (
    BUILDER,
    STEP_MS,
    becomes,
    collect,
    started,
    tokens,
)


async def test_gateways_use_the_engine_of_another_process_and_outlive_it() -> None:
    recipe = EngineRecipe(builder=BUILDER, arguments=STEP_MS)

    with EngineProcess(recipe) as first:
        endpoint = first.spec.endpoint
        owner = ProcessEngineClient(recipe, first=first)
        one, other = RemoteEngineClient(endpoint), RemoteEngineClient(endpoint)
        async with started(owner), started(one), started(other):
            answers = [await collect(each, "same-id") for each in (one, other)]
            assert tokens(answers[0]) == tokens(answers[1]) != []
            pid = owner.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await becomes(lambda: not one.is_ready)
            await becomes(lambda: one.is_ready and other.is_ready and owner.is_ready)
            assert owner.pid != pid
            assert tokens(await collect(other, "again")) == tokens(answers[0])
        assert owner.pid is None
