"""A prompt that another process computes gives the text of one engine, whichever of them is killed.

Three engine processes of the shipped pair in float32: one for prompts, two for answers. Greedy and
sampled, with and without guesses; each round has its own salt, so nothing of another is cached.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.events import Finished
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet import block_sources
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.settings.tree import load_settings
from tests.engines import make_request
from tests.gateway.engines.backends.clients import run, started
from tests.gateway.engines.backends.clients import tokens as tokens_of
from tests.gateway.engines.backends.replicas import make_keys
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.laws.gateways import ENGINE
from tests.laws.test_moved_blocks_law import long_prompts


@contextmanager
def process(folder: Path, role: str, armed: str) -> Iterator[str]:
    """An engine's process; yields its address."""
    flags = {**ENGINE, "engine.role": role}
    settings = load_settings(flags=flags, environ={}, config_file=None)
    arguments = json.dumps(
        {
            "settings": settings.model_dump_json(),
            "keys": str(folder / "fleet.key"),
            "armed": str(folder / armed),
        }
    )
    command = [sys.executable, "-m", "tests.laws.peer_process", arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().strip()
        finally:
            running.kill()


def replica_at(endpoint: str, keys: FleetKeys) -> EngineReplica:
    client = RemoteEngineClient(endpoint, keys, policy=ReconnectPolicy(resume_within_s=0))
    return EngineReplica(endpoint, client, process=client, endpoint=endpoint)


def requests_of(salt: str) -> list[EngineRequest]:
    made = [
        make_request(
            f"{salt}{number}",
            prompt,
            max_tokens=24,
            temperature=0.9 * (number % 2),
            seed=number,
            cache_salt=salt,
        )
        for number, prompt in enumerate(long_prompts(4))
    ]
    plain = SpeculationParams(enabled=False)
    return [replace(each, speculation=plain) if n > 1 else each for n, each in enumerate(made)]


async def ask_all(pool: EnginePool, salt: str) -> tuple[list[list[int]], int]:
    """The tokens of all answers, and how many prompt tokens counted as cached."""
    readers = [Reader(pool, request) for request in requests_of(salt)]
    endings = await asyncio.gather(*(reader.rest() for reader in readers))
    assert all(isinstance(each, Finished) for each in endings), endings
    num_cached = sum(each.stats.num_cached_tokens for each in endings if each.stats is not None)
    return [tokens_of(reader.events) for reader in readers], num_cached


@pytest.mark.slow
def test_prompts_computed_apart_give_the_same_text_whoever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(stack: ExitStack) -> None:
        keys = make_keys(tmp_path)
        roles = (("prefill", "p"), ("decode", "d"), ("decode", "d"))
        addresses = [stack.enter_context(process(tmp_path, *each)) for each in roles]
        pool = EnginePool(replica_at(each, keys) for each in addresses)
        is_apart = False
        monkeypatch.setattr(block_sources, "pays_apart", lambda *_: is_apart)
        async with started(pool):
            await all_up(pool)
            right, _ = await ask_all(pool, "cold")
            assert (await pool.stats()).peers.num_pulled_tokens == 0
            is_apart = True
            # What was computed for these requests is not billed as cached.
            assert await ask_all(pool, "apart") == (right, 0)
            peers = (await pool.stats()).peers
            num_tokens = sum(len(each.prompt_token_ids) // 16 * 16 for each in requests_of(""))
            assert peers.num_pulled_tokens >= num_tokens - 16 * 4
            assert peers.num_late == peers.num_failed == peers.num_damaged == 0
            for armed, moment in (("d", "prefilled"), ("p", "exporting")):
                (tmp_path / armed).write_text(moment, encoding="utf-8")
                answers, _ = await ask_all(pool, f"kill {armed}")
                assert answers == right
                assert not (tmp_path / armed).exists()
            answers, _ = await ask_all(pool, "alone")
            assert answers == right

    with ExitStack() as stack:
        run(main(stack))
