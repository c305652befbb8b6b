"""The task that probes replicas whose breaker is open."""

import asyncio
from typing import cast

import pytest

from outrider.gateway.upstream.probing import Prober
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.transport import Transport


class Healthy:
    """Replicas of which none has to be probed for now."""

    probe_wait_s = 60.0


@pytest.mark.parametrize("num_turns", range(4))
async def test_probing_ends_when_it_is_cancelled_in_the_turn_of_a_failure(num_turns: int) -> None:
    """A gateway that stopped while a server failed waited for this task for ever."""

    prober = Prober(
        transport=cast(Transport, None),
        replicas=cast(ReplicaSet, Healthy()),
        headers={},
        path="/models",
    )
    task = asyncio.create_task(prober.run())
    await asyncio.sleep(0.01)
    prober.wake()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    is_over = task.done()
    task.cancel()  # a second cancellation is not lost
    assert is_over
