"""What does a pool of engines add to a request: before its first token, and for each chunk?

Question: how much later do an answer's first token and each of its chunks come through `EnginePool`
than from the engine's client itself?

Method: an engine in this process whose answers are there at once, alone, in a pool of one replica,
and in a pool of `--replicas` of them, in turn (A B C A B C), `--requests` answers of `--chunks`
chunks a round, one after the other. What is left of the time is the clients' own.

Reading it: `added` is the time over that of the engine alone, the median over rounds of a round's
median for the first token, of a round's mean for a chunk. A pool of many replicas looks at all of
them for each request, and at none for a chunk.

    python -m benchmarks.gateway.bench_pool
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    measure_in_turn,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.mock_engine import MockEngine
from benchmarks.shared.record import percentile
from outrider.engine.events import TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import Replica
from outrider.verifier.params import SamplingParams

_FIRST_GOAL_S: Final = 0.3e-3
_CHUNK_GOAL_S: Final = 0.1e-3
_TOKENS_A_CHUNK: Final = 4


async def one_round(client: EngineClient, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds to the first token, and those between two chunks."""
    firsts: list[float] = []
    chunk_s = 0.0
    num_chunks = 0
    for number in range(arguments.requests):
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=(5,) * arguments.prompt_tokens,
            tier="large",
            sampling=SamplingParams(max_tokens=_TOKENS_A_CHUNK * arguments.chunks),
        )
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        async for event in client.submit(request):
            if isinstance(event, TokensEmitted):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                num_chunks += 1
        firsts.append(first_s - began_s)
        chunk_s += last_s - first_s
        num_chunks -= 1  # behind the first one
    return percentile(firsts, 50.0), chunk_s / num_chunks


def pool_of(count: int) -> EnginePool:
    """Return a pool of as many engines."""
    return EnginePool(Replica(f"replica-{number}", MockEngine()) for number in range(count))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; return the figures by client."""
    clients: dict[str, EngineClient] = {
        "alone": MockEngine(),
        "pool of 1": pool_of(1),
        f"pool of {arguments.replicas}": pool_of(arguments.replicas),
    }
    with asyncio.Runner() as runner:
        for client in clients.values():
            runner.run(client.start())
        runner.run(asyncio.sleep(0.2))  # the other replicas start beside the first
        rounds = measure_in_turn(
            {
                name: lambda client=client: runner.run(one_round(client, arguments))  # type: ignore[misc]
                for name, client in clients.items()
            },
            repeats=arguments.repeats,
        )
        for client in clients.values():
            runner.run(client.close())
    alone = rounds["alone"]
    return {
        name: {
            "first_token_s": Summary.of([first for first, _ in own]),
            "chunk_s": Summary.of([chunk for _, chunk in own]),
            "added_first_token_s": Summary.of(
                [first - bare for (first, _), (bare, _) in zip(own, alone, strict=True)]
            ),
            "added_chunk_s": Summary.of(
                [chunk - bare for (_, chunk), (_, bare) in zip(own, alone, strict=True)]
            ),
        }
        for name, own in rounds.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="in each round")
    parser.add_argument("--chunks", type=int, default=50, help="of four tokens, in an answer")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=1000, help="of the large pool")
    arguments = parser.parse_args(argv)
    results = measure(arguments)
    microseconds = 1e6
    show_table(
        "a pool beside its engine alone, microseconds",
        ["client", "first token", "added", "<= 300", "chunk", "added", "<= 100"],
        [
            [
                name,
                f"{own['first_token_s'].median * microseconds:.1f}",
                f"{own['added_first_token_s'].median * microseconds:.1f}",
                verdict(own["added_first_token_s"].median <= _FIRST_GOAL_S),
                f"{own['chunk_s'].median * microseconds:.1f}",
                f"{own['added_chunk_s'].median * microseconds:.1f}",
                verdict(own["added_chunk_s"].median <= _CHUNK_GOAL_S),
            ]
            for name, own in results.items()
        ],
    )
    write_results("bench_pool", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
