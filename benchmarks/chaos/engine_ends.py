"""Do answers lose, repeat or pay twice for tokens where engines end in the middle of them?

Method: three engines on the bundled pair, each in a thread of this process, behind an
`EnginePool`. Clients ask without a pause: both tiers, greedy and sampled. One engine after the
other is made to raise in a step, at a random token, and is replaced by a new one, `--ends` times.
Every answer is compared with that of an engine that was left alone, token for token, and what it is
billed with what its client has. A request that was in flight at two ends fails; what it has of the
answer until then must be right, too.

Reading it: `num_lost`, `num_repeated`, `num_other` and `num_misbilled` tokens must be 0; the script
fails otherwise. A kill -9 of a process is in tests/laws/test_killed_replicas_law.py.

    python -m benchmarks.chaos.engine_ends --ends 1000
"""

import argparse
import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared.harness import (
    argument_parser,
    progress_bar,
    show_table,
    start,
    variant_name,
    write_results,
)
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Failed, Finished, TokensEmitted
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.verifier.params import TIERS, SamplingParams, Tier

_NUM_REQUESTS = 32
_MOST_TOKENS = 16
_MOST_BEFORE_AN_END = 12
_POLL_S = 0.005

Models = Mapping[Tier, CausalModel]


class _EndingEngine:
    """An engine whose step raises when so many more tokens have left it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *arguments: Any) -> list[EngineEvent]:
        if self.num_left is not None and self.num_left <= 0:
            raise RuntimeError("this engine was told to end")
        # Events are returned in one piece: what an engine that ends has said, it has said.
        events = self._engine.step(None, *arguments[1:])
        if self.num_left is not None:
            self.num_left -= sum(len(e.token_ids) for e in events if isinstance(e, TokensEmitted))
        return events


def _engine(models: Models) -> Engine:
    runners = {
        tier: ModelRunner(model=model, num_blocks=256, block_size=16)
        for tier, model in models.items()
    }
    drafter = TreeDrafter(runner=runners["small"])
    return Engine(runners=runners, drafter=drafter)


def _replica(name: str, models: Models) -> tuple[EngineReplica, _EndingEngine]:
    ending = _EndingEngine(_engine(models))
    return EngineReplica(name, InProcessEngineClient(lambda _: ending)), ending


def _requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(300, 2000) for _ in range(rng.randint(8, 40))),
            tier=TIERS[number % 2],
            sampling=SamplingParams(
                max_tokens=rng.randint(1, _MOST_TOKENS),
                temperature=0.8 * (number % 4 > 1),
                seed=number,
            ),
        )
        for number in range(_NUM_REQUESTS)
    ]


async def _answer(pool: EnginePool, request: EngineRequest) -> tuple[list[int], EngineEvent]:
    """Return an answer's tokens and its end."""
    token_ids: list[int] = []
    async for event in pool.submit(request):
        if isinstance(event, TokensEmitted):
            token_ids += event.token_ids
        last = event
    return token_ids, last


async def measure(models: Models, num_ends: int, *, seed: int, clients: int) -> dict[str, Any]:
    """Let so many engines end; return what came of the answers."""
    requests, rng = _requests(seed), random.Random(seed)
    undisturbed = EnginePool([_replica("alone", models)[0]])
    await undisturbed.start()
    right = [(await _answer(undisturbed, request))[0] for request in requests]
    await undisturbed.close()
    engines: dict[str, _EndingEngine] = {}
    counts: Counter[str] = Counter(num_ends=0)
    pool = EnginePool()

    def add(number: int) -> None:
        replica, engines[str(number)] = _replica(str(number), models)
        pool.add(replica)

    for number in range(3):
        add(number)
    await pool.start()
    with progress_bar("engines that end", num_ends) as advance:
        await asyncio.gather(
            _end_all(pool, engines, add, num_ends, rng, counts, advance),
            *(_keep_asking(pool, requests, right, num_ends, rng, counts) for _ in range(clients)),
        )
    counts["num_resumed"] = pool.failovers["died"]
    await pool.close()
    names = ("num_lost", "num_repeated", "num_other", "num_misbilled", "num_failed_at_two_ends")
    return {**dict.fromkeys(names, 0), **counts}


async def _end_all(
    pool: EnginePool,
    engines: dict[str, _EndingEngine],
    add: Callable[[int], None],
    num_ends: int,
    rng: random.Random,
    counts: Counter[str],
    advance: Callable[[str], None],
) -> None:
    while counts["num_ends"] < num_ends:
        up = [state.name for state in pool.states() if state.is_up]
        if len(up) < 2:
            await asyncio.sleep(_POLL_S)
            continue
        name = rng.choice(up)
        engines[name].num_left = rng.randint(0, _MOST_BEFORE_AN_END)
        while any(each.name == name and each.is_up for each in pool.states()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        counts["num_ends"] += 1
        add(counts["num_ends"] + 2)
        await pool.remove(name)
        del engines[name]
        advance("")


async def _keep_asking(
    pool: EnginePool,
    requests: Sequence[EngineRequest],
    right: Sequence[list[int]],
    num_ends: int,
    rng: random.Random,
    counts: Counter[str],
) -> None:
    while counts["num_ends"] < num_ends:
        counts["num_requests"] += 1
        place = rng.randrange(len(requests))
        # A tenant of its own, or a prompt that met two ends would be refused for ten minutes.
        name = str(counts["num_requests"])
        request = replace(requests[place], request_id=name, tenant=name)
        token_ids, last = await _answer(pool, request)
        whole = right[place]
        counts["num_tokens"] += len(token_ids)
        counts["num_repeated"] += max(len(token_ids) - len(whole), 0)
        if isinstance(last, Failed) and last.code == "engine_died_twice":
            counts["num_failed_at_two_ends"] += 1
            whole = whole[: len(token_ids)]
        counts["num_lost"] += max(len(whole) - len(token_ids), 0)
        counts["num_other"] += sum(a != b for a, b in zip(token_ids, whole, strict=False))
        assert isinstance(last, Finished | Failed)
        billed = sum(work.num_output_tokens for work in last.work)
        counts["num_misbilled"] += abs(billed - len(token_ids))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results. Raises SystemExit where a token is wrong."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ends", type=int, default=100, help="engines that end")
    parser.add_argument("--clients", type=int, default=8, help="that ask at a time")
    arguments: argparse.Namespace = parser.parse_args(argv)
    models = {
        tier: load_model(str(getattr(arguments, tier)), dtype="float32", device="cpu")
        for tier in TIERS
    }
    logging.disable(logging.ERROR)  # each end is logged with its stack
    try:
        found = asyncio.run(
            measure(models, arguments.ends, seed=arguments.seed, clients=arguments.clients)
        )
    finally:
        logging.disable(logging.NOTSET)
    show_table("engines that end", ("", ""), [[name, str(count)] for name, count in found.items()])
    write_results("engine_ends", variant_name(arguments), found, arguments)
    wrong = ("num_lost", "num_repeated", "num_misbilled", "num_other")
    if any(found[name] for name in wrong):
        raise SystemExit(f"tokens were wrong: {', '.join(f'{n}={found[n]}' for n in wrong)}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start(main)
