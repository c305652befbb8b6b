"""What does an engine behind a socket that gateways share add, beside one in a process of its own?

Question: how much later do an answer's first token and each of its chunks come through
`RemoteEngineClient` (TCP over loopback, CURVE), and through an `EnginePool` over one with placement
by its cache, than through `ProcessEngineClient` (a private socket file), as `outrider serve` has it
without `--engines`?

Method: an engine whose steps sleep and whose tokens say when they left it, once behind each client,
in turn (A B C A B C): `--requests` answers of `--chunks` chunks a round, `--streams` at once. The
time to the first token includes one step; a chunk's time is its age when the reader has it.

Reading it: `added` is the time over that of the private process in the same round, the median over
rounds of a round's median. processor: seconds of this process, the gateway's side, for each chunk;
what other programs take of the machine is not in it, so it can be compared on a busy one, too.

    python -m benchmarks.gateway.bench_remote_engine
"""

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Results,
    Table,
    microseconds,
    option,
    within,
)
from benchmarks.shared.harness import measure_in_turn
from benchmarks.shared.record import Summary, percentile
from benchmarks.shared.stamped_engine import TOKENS_A_CHUNK, StampedEngine, age_s
from outrider.engine.events import TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, KeyPair
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.engines.backends.step_loop import serve_loaded
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.verifier.params import SamplingParams

_FIRST_GOAL_S: Final = 0.3e-3
_CHUNK_GOAL_S: Final = 0.1e-3


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    requests: int = option(64, "in each round")
    streams: int = option(1, "requests at once")
    chunks: int = option(50, "of four tokens, in an answer")
    prompt_tokens: int = option(500)
    step_ms: float = option(2.0, "sleep of a step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Medians of one round, in seconds."""

    first_token_s: float
    chunk_s: float
    processor_s: float


def _serve(keys: FleetKeys, step_s: float, line: Connection) -> None:
    """Be an engine replica, until the process is ended."""
    listener = EngineListener("tcp://127.0.0.1:0", keys, ListenerBounds())
    line.send(listener.endpoint)
    engine = StampedEngine(step_s)
    listener.open(engine.info(), {})
    serve_loaded(engine, listener)


@contextmanager
def replica(keys: FleetKeys, step_s: float) -> Iterator[str]:
    """Run a replica in a process; yield its address."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(keys, step_s, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def pool_over(endpoint: str, keys: FleetKeys) -> EnginePool:
    """Return a pool as `outrider serve --engines` has it, over one replica."""
    index = BlockIndex()
    client = RemoteEngineClient(endpoint, keys, policy=ReconnectPolicy(resume_within_s=0))
    member = EngineReplica(endpoint, client, index_lane=index.add_lane(), process=client)
    tiers = {"large": replace(StampedEngine(0.0).info().tiers["large"], block_size=16)}
    return EnginePool([member], CacheAware(index, tiers=tiers))  # type: ignore[arg-type]


async def one_answer(
    client: EngineClient, request_id: str, options: Options, ages: list[float]
) -> float:
    """Return the seconds to the first token; note the age of each chunk."""
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=(5,) * options.prompt_tokens,
        tier="large",
        sampling=SamplingParams(max_tokens=TOKENS_A_CHUNK * options.chunks),
        arrival_s=time.monotonic(),
    )
    began_s, first_s = time.perf_counter(), 0.0
    async for event in client.submit(request):
        if isinstance(event, TokensEmitted):
            first_s = first_s or time.perf_counter() - began_s
            ages.append(age_s(event.token_ids))
    return first_s


async def one_round(client: EngineClient, options: Options) -> Round:
    """Have the answers given, `--streams` at once."""
    ages: list[float] = []
    firsts: list[float] = []
    began_s = time.process_time()
    for number in range(0, options.requests, options.streams):
        answers = (
            one_answer(client, str(number + offset), options, ages)
            for offset in range(options.streams)
        )
        firsts += await asyncio.gather(*answers)
    return Round(
        first_token_s=percentile(firsts, 50.0),
        chunk_s=percentile(ages, 50.0),
        processor_s=(time.process_time() - began_s) / len(ages),
    )


def measure(options: Options) -> Results:
    """Run all rounds; return the figures by client."""
    keys = FleetKeys(server=KeyPair.new(), client=KeyPair.new())
    step_s = options.step_ms / 1000
    recipe = EngineRecipe(builder="benchmarks.shared.stamped_engine:build", arguments=str(step_s))
    with (
        replica(keys, step_s) as endpoint,
        replica(keys, step_s) as of_pool,
        asyncio.Runner() as runner,
    ):
        clients: dict[str, EngineClient] = {
            "process": ProcessEngineClient(recipe),
            "remote": RemoteEngineClient(endpoint, keys),
            "pool of one remote": pool_over(of_pool, keys),
        }

        def ask(client: EngineClient) -> Round:
            return runner.run(one_round(client, options))

        for client in clients.values():
            runner.run(client.start())
        rounds = measure_in_turn(
            {name: partial(ask, client) for name, client in clients.items()},
            repeats=options.repeats,
        )
        for client in clients.values():
            runner.run(client.close())
    return {
        name: {
            field: Summary.of([getattr(each, field) for each in own]) for field in Round.__slots__
        }
        | {
            f"added_{field}": Summary.of(
                [
                    getattr(each, field) - getattr(other, field)
                    for each, other in zip(own, rounds["process"], strict=True)
                ]
            )
            for field in Round.__slots__
        }
        for name, own in rounds.items()
    }


_COLUMNS: Final = (
    ("first token", microseconds("first_token_s", ".0f")),
    ("added", microseconds("added_first_token_s", ".0f")),
    ("<= 300", within("added_first_token_s", _FIRST_GOAL_S)),
    ("chunk", microseconds("chunk_s", ".0f")),
    ("added", microseconds("added_chunk_s", ".0f")),
    ("<= 100", within("added_chunk_s", _CHUNK_GOAL_S)),
    ("processor", microseconds("processor_s", ".0f")),
    ("added", microseconds("added_processor_s", ".0f")),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a client."""
    title = "an engine over TCP with keys beside one in a private process, microseconds"
    yield Table(title=title, columns=_COLUMNS, entries=results, first="client")


def _variant(options: Options) -> str:
    return f"stamped-{options.streams}-streams"


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant=_variant)

if __name__ == "__main__":
    BENCHMARK.start()
