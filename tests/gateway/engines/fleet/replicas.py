"""Pools of scripted engines in threads of this process, which end when they are told to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outrider.engine.events import EngineEvent
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from tests.gateway.engines.backends.clients import started
from tests.gateway.scripted_engine import ScriptedEngine


class MortalEngine(ScriptedEngine):
    """Its step raises once it is doomed; at the latest when so many tokens have left it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_doomed = False
        self.ends_after: int | None = None

    def step(self, *args: Any) -> list[EngineEvent]:
        if self.is_doomed or (
            self.ends_after is not None and self.num_output_tokens >= self.ends_after
        ):
            raise RuntimeError("told to end")
        return super().step(*args)


def mortal(name: str, **options: Any) -> tuple[EngineReplica, MortalEngine]:
    engine = MortalEngine(**{"step_s": 0.001, **options})
    return EngineReplica(name, InProcessEngineClient(lambda _: engine)), engine


@asynccontextmanager
async def pool_of(
    *names: str, resume_within_s: float = 5.0, drain_timeout_s: float = 5.0, **options: Any
) -> AsyncIterator[tuple[EnginePool, dict[str, MortalEngine]]]:
    made = {name: mortal(name, **options) for name in names}
    replicas = [replica for replica, _ in made.values()]
    pool = EnginePool(replicas, resume_within_s=resume_within_s, drain_timeout_s=drain_timeout_s)
    async with started(pool):
        await all_up(pool)
        yield pool, {name: engine for name, (_, engine) in made.items()}


async def all_up(pool: EnginePool) -> None:
    for replica in pool._roster.replicas.values():
        if replica.starting is not None:
            await replica.starting


def replica_of(pool: EnginePool, request_id: str) -> str:
    replica = pool._flights[request_id].replica
    assert replica is not None
    return replica.name
