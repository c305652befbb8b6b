"""Hundreds of streams at once on the real engine; most clients hang up; no block stays held."""

import asyncio
import random
import re

import httpx
import pytest

from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.serving import background_gateway
from tests.sizes import repeats

NUM_STREAMS = repeats(300, 60)


async def _one_stream(client: httpx.AsyncClient, number: int) -> str:
    """Read a stream to its end, or hang up after some chunks, or before the first."""
    rng = random.Random(number)
    num_chunks = rng.choice((0, 1, 3, 8, None))
    body = {
        "model": rng.choice(("auto", "small", "large")),
        "messages": [{"role": "user", "content": f"What is {number} + {rng.randrange(9999)}?"}],
        "max_tokens": repeats(100, 48),
        "temperature": rng.choice((0, 0.8)),
        "n": rng.choice((1, 1, 2)),
        "stream": True,
    }
    if num_chunks == 0:  # while it waits or its prompt is computed
        try:
            await asyncio.wait_for(client.post("/v1/chat/completions", json=body), rng.random())
        except TimeoutError:
            return "hung up"
        return "ended"
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        seen = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "ended"
            seen += line.startswith("data: ")
            if seen == num_chunks:
                return "hung up"
    return "broke off"


async def _all_streams(url: str) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        streams = (_one_stream(client, number) for number in range(NUM_STREAMS))
        return await asyncio.gather(*streams)


def _gauges(url: str, name: str) -> list[float]:
    text = httpx.get(f"{url}/metrics").text
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)]


async def _until_idle(url: str) -> dict[str, list[float]]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(100):
        held = {name: _gauges(url, f"outrider_{name}") for name in names}
        if all(held.values()) and not any(sum(values) for values in held.values()):
            break
        await asyncio.sleep(0.1)
    return held


@pytest.mark.slow
def test_random_disconnects_leave_no_block_held() -> None:
    settings = load_settings(
        flags={
            "engine.num_threads": 1,
            "engine.num_blocks": 400,  # fewer than 300 answers need: they queue and are pre-empted
            "engine.max_waiting": 1000,
            "speculation.adaptive": False,
        },
        environ={},
        config_file=None,
    )
    with background_gateway(settings, no_progress) as gateway:
        ends = asyncio.run(_all_streams(gateway))
        assert ends.count("ended") + ends.count("hung up") == NUM_STREAMS
        assert ends.count("hung up") > NUM_STREAMS // 4
        held = asyncio.run(_until_idle(gateway))
        assert all(values and sum(values) == 0 for values in held.values()), held
        assert httpx.get(f"{gateway}/ready").status_code == 200
