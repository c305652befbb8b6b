"""What does it cost to have a prompt computed by another engine, and what do other readers gain?

Question: a prefill engine computes a prompt, and the engine that answers pulls its blocks over a
socket on this machine. How much later does the answer begin than where one engine does both? And
how long do the readers of that engine wait between two tokens while long prompts arrive?

Method: the bundled pair's large model grown to --large parameters, in bfloat16, without drafts; two
processes, a thread each, so two cores that nothing else uses. In each round three new texts of each
length: one is answered by the prefill engine itself (alone); one is computed there and answered
here (apart). Then an answer is written here while --prompts more prompts arrive, which this engine
computes itself, or has computed apart. Before it counts, the text of an answer behind pulled blocks
is compared with the one that is computed here.

Reading it: `added / alone` is the wait that moving adds; `apart / both` is the 99th percentile of
the time between two tokens. Only on a quiet machine.

    python -m benchmarks.speculation.bench_kv_peers
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, figure, option
from benchmarks.shared.grown import grown
from benchmarks.shared.record import Summary, paired_ratio
from outrider.engine.cache.peers import Peers
from outrider.engine.core import Engine
from outrider.engine.events import TokensEmitted
from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import BlockSource, EngineRequest
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.step_loop import serve_loaded
from outrider.gateway.engines.fleet.block_sources import prompt_of
from outrider.gateway.settings.tree import bundled_pair
from outrider.verifier.params import SamplingParams

_MOST_ADDED: Final = 0.10
_MOST_P99: Final = 0.6
_ANSWER: Final = 128
_WAIT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(3, "rounds")
    large: str = option("400M", "parameters that the large model is grown to")
    length: int = option(2000, "tokens of a prompt")
    prompts: int = option(2, "that arrive while an answer is written")
    seed: int = option(0)


def _engine(options: Options, peers: Peers | None) -> Engine:
    torch.set_num_threads(1)
    model = load_model(str(grown(bundled_pair() / "large", options.large)), dtype="bfloat16")
    num_blocks = (options.length // 16 + 32) * (options.prompts + 2)
    return Engine(runners={"large": ModelRunner(model=model, num_blocks=num_blocks)}, peers=peers)


def _serve(options: Options, line: Connection) -> None:
    """Be the prefill engine, until the process is ended."""
    engine = _engine(options, None)
    listener = EngineListener("tcp://127.0.0.1:0", None, ListenerBounds())
    listener.open(engine.info(), {})
    line.send(listener.endpoint)
    serve_loaded(engine, listener)


@contextmanager
def _prefill_engine(options: Options) -> Iterator[str]:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(options, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


@dataclass(kw_only=True)
class _Bench:
    """Both engines, and new texts."""

    options: Options
    there: EngineClient
    here: EngineClient
    endpoint: str
    rng: random.Random
    num_requests: int = 0

    def request(self, max_tokens: int) -> EngineRequest:
        self.num_requests += 1
        return EngineRequest(
            request_id=str(self.num_requests),
            prompt_token_ids=tuple(self.rng.randrange(5, 400) for _ in range(self.options.length)),
            tier="large",
            sampling=SamplingParams(max_tokens=max_tokens),
        )

    async def apart(self, request: EngineRequest) -> "_Heard":
        """The prompt is computed there, the answer written here."""
        source = BlockSource(endpoint=self.endpoint, num_tokens=self.options.length, wait_s=_WAIT_S)
        _, heard = await asyncio.gather(
            _ask(self.there, prompt_of(request)), _ask(self.here, replace(request, source=source))
        )
        return heard

    async def round(self) -> dict[str, Any]:
        """Return the seconds of a round, and whether both ways gave the same text."""
        alone = await _ask(self.there, self.request(1))
        asked = self.request(16)
        apart = await self.apart(asked)
        salted = replace(asked, request_id="again", cache_salt="cold")
        again = await _ask(self.here, salted)
        return {
            "alone_s": alone.first_s,
            "apart_s": apart.first_s,
            "both_p99_s": await self._gaps(is_apart=False),
            "apart_p99_s": await self._gaps(is_apart=True),
            "is_equal": apart.tokens == again.tokens,
        }

    async def _gaps(self, *, is_apart: bool) -> float:
        """Return the 99th percentile between two tokens of an answer while prompts arrive."""
        begun = asyncio.Event()
        reader = asyncio.create_task(_ask(self.here, self.short_request(), begun))
        await begun.wait()
        prompts = [self.request(1) for _ in range(self.options.prompts)]
        ask = self.apart if is_apart else lambda each: _ask(self.here, each)
        await asyncio.gather(*map(ask, prompts))
        heard = await reader
        return float(np.percentile(np.diff(heard.at_s), 99))

    def short_request(self) -> EngineRequest:
        request = self.request(_ANSWER)
        return replace(request, prompt_token_ids=request.prompt_token_ids[:64])


@dataclass(kw_only=True)
class _Heard:
    """What a reader got, and when."""

    first_s: float
    at_s: list[float]
    tokens: list[int]


async def _ask(
    client: EngineClient, request: EngineRequest, begun: asyncio.Event | None = None
) -> _Heard:
    begun_s = time.perf_counter()
    heard = _Heard(first_s=0.0, at_s=[], tokens=[])
    async for event in client.submit(request):
        if isinstance(event, TokensEmitted):
            heard.at_s.append(time.perf_counter())
            heard.tokens += event.token_ids
            if begun is not None:
                begun.set()
    if heard.at_s:
        heard.first_s = heard.at_s[0] - begun_s
    return heard


async def _rounds(options: Options, endpoint: str, peers: PeerLines) -> dict[str, Any]:
    here = InProcessEngineClient(lambda _: _engine(options, peers))
    there = RemoteEngineClient(endpoint)
    await asyncio.gather(here.start(), there.start())
    bench = _Bench(
        options=options,
        there=there,
        here=here,
        endpoint=endpoint,
        rng=random.Random(options.seed),
    )
    try:
        for client in (here, there):
            await _ask(client, bench.short_request())  # passes are timed
        rounds = [await bench.round() for _ in range(options.repeats)]
        stats = (await here.stats()).peers
    finally:
        await asyncio.gather(here.close(), there.close())
    columns = {name: [each[name] for each in rounds] for name in rounds[0]}
    added = [
        apart - alone for apart, alone in zip(*_pair(columns, "apart_s", "alone_s"), strict=True)
    ]
    return {
        "alone_s": Summary.of(columns["alone_s"]),
        "apart_s": Summary.of(columns["apart_s"]),
        "added_over_alone": paired_ratio(added, columns["alone_s"]),
        "both_p99_s": Summary.of(columns["both_p99_s"]),
        "apart_p99_s": Summary.of(columns["apart_p99_s"]),
        "apart_over_both": paired_ratio(*_pair(columns, "apart_p99_s", "both_p99_s")),
        "pulled_bytes": stats.num_pulled_bytes,
        "pulled_tokens": stats.num_pulled_tokens,
        "bytes_per_s": stats.bytes_per_s,
        "late": stats.num_late,
        "answers_are_equal": all(columns["is_equal"]),
    }


def _pair(
    columns: dict[str, list[float]], first: str, second: str
) -> tuple[list[float], list[float]]:
    return columns[first], columns[second]


def measure(options: Options) -> Results:
    """Return the times to the first token and between tokens, and what was moved."""
    with _prefill_engine(options) as endpoint, closing(PeerLines(None)) as peers:
        return asyncio.run(_rounds(options, endpoint, peers))


def tables(options: Options, results: Results) -> Iterator[Table]:
    """One row."""
    yield Table(
        title=f"prompts of {options.length} tokens, large model of {options.large}",
        columns=(
            ("alone, s", figure("alone_s", ".3f")),
            ("apart, s", figure("apart_s", ".3f")),
            ("added / alone", figure("added_over_alone", ".3f")),
            ("p99 of both, s", figure("both_p99_s", ".3f")),
            ("apart, s", figure("apart_p99_s", ".3f")),
            ("apart / both", figure("apart_over_both", ".3f")),
        ),
        entries={"first token, and between tokens": results},
    )


def goals(results: Results) -> list[Goal]:
    """Return what prompts computed apart are to keep."""
    return [
        Goal(words="added / alone", measured=results["added_over_alone"].median, bound=_MOST_ADDED),
        Goal(words="apart / both", measured=results["apart_over_both"].median, bound=_MOST_P99),
        Goal(
            words="answers that are equal",
            measured=float(results["answers_are_equal"]),
            bound=1.0,
            at_least=True,
        ),
    ]


def _variant(options: Options) -> str:
    return f"{options.large}-bfloat16-{options.length}-tokens"


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, variant=_variant, goals=goals
)

if __name__ == "__main__":
    BENCHMARK.start()
