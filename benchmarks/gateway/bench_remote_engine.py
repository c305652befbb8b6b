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

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    measure_in_turn,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.record import percentile
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
from outrider.gateway.engines.backends.watched_client import Patience
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import Replica
from outrider.verifier.params import SamplingParams

_FIRST_GOAL_S: Final = 0.3e-3
_CHUNK_GOAL_S: Final = 0.1e-3


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
    client = RemoteEngineClient(endpoint, keys, patience=Patience(resume_within_s=0))
    member = Replica(endpoint, client, index_lane=index.add_lane(), process=client)
    tiers = {"large": replace(StampedEngine(0.0).info().tiers["large"], block_size=16)}
    return EnginePool([member], CacheAware(index, tiers=tiers))  # type: ignore[arg-type]


async def one_answer(
    client: EngineClient, request_id: str, arguments: argparse.Namespace, ages: list[float]
) -> float:
    """Return the seconds to the first token; note the age of each chunk."""
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=(5,) * arguments.prompt_tokens,
        tier="large",
        sampling=SamplingParams(max_tokens=TOKENS_A_CHUNK * arguments.chunks),
        arrival_s=time.monotonic(),
    )
    began_s, first_s = time.perf_counter(), 0.0
    async for event in client.submit(request):
        if isinstance(event, TokensEmitted):
            first_s = first_s or time.perf_counter() - began_s
            ages.append(age_s(event.token_ids))
    return first_s


async def one_round(client: EngineClient, arguments: argparse.Namespace) -> Round:
    """Have the answers given, `--streams` at once."""
    ages: list[float] = []
    firsts: list[float] = []
    began_s = time.process_time()
    for number in range(0, arguments.requests, arguments.streams):
        answers = (
            one_answer(client, str(number + offset), arguments, ages)
            for offset in range(arguments.streams)
        )
        firsts += await asyncio.gather(*answers)
    return Round(
        first_token_s=percentile(firsts, 50.0),
        chunk_s=percentile(ages, 50.0),
        processor_s=(time.process_time() - began_s) / len(ages),
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; return the figures by client."""
    keys = FleetKeys(server=KeyPair.new(), client=KeyPair.new())
    step_s = arguments.step_ms / 1000
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
        for client in clients.values():
            runner.run(client.start())
        rounds = measure_in_turn(
            {
                name: lambda client=client: runner.run(one_round(client, arguments))  # type: ignore[misc]
                for name, client in clients.items()
            },
            repeats=arguments.repeats,
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64, help="in each round")
    parser.add_argument("--streams", type=int, default=1, help="requests at once")
    parser.add_argument("--chunks", type=int, default=50, help="of four tokens, in an answer")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=2.0, help="sleep of a step")
    arguments = parser.parse_args(argv)
    results = measure(arguments)
    microseconds = 1e6
    show_table(
        "an engine over TCP with keys beside one in a private process, microseconds",
        [
            "client",
            "first token",
            "added",
            "<= 300",
            "chunk",
            "added",
            "<= 100",
            "processor",
            "added",
        ],
        [
            [
                name,
                f"{own['first_token_s'].median * microseconds:.0f}",
                f"{own['added_first_token_s'].median * microseconds:.0f}",
                verdict(own["added_first_token_s"].median <= _FIRST_GOAL_S),
                f"{own['chunk_s'].median * microseconds:.0f}",
                f"{own['added_chunk_s'].median * microseconds:.0f}",
                verdict(own["added_chunk_s"].median <= _CHUNK_GOAL_S),
                f"{own['processor_s'].median * microseconds:.0f}",
                f"{own['added_processor_s'].median * microseconds:.0f}",
            ]
            for name, own in results.items()
        ],
    )
    write_results("bench_remote_engine", f"stamped-{arguments.streams}-streams", results, arguments)


if __name__ == "__main__":
    start(main)
