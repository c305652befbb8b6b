"""A fleet that audits itself finds the replica whose answers are wrong, and no honest one.

The bundled pair, in engines in threads of this process, all of which name the same arithmetic. One
of three has a bit of one weight flipped, weights of eight bits, or another sampling rule.
"""

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.answer_audits import AuditPolicy
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from tests.engines import PAIR_FOLDER, heldout_prompts, make_engine, make_request, shipped_pair
from tests.gateway.engines.backends.clients import becomes, started
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.laws.test_resumed_law import COMPILERS, requests_of

LARGE = PAIR_FOLDER / "large"
POLICY = AuditPolicy(share=1.0, removes_at=0.05)
# While a model is loaded, its dtype is the process's own.
LOADING = threading.Lock()


class OtherRule:
    """An engine that draws with noise of its own, whatever seed it is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def submit(self, request: EngineRequest) -> None:
        sampling = replace(request.sampling, seed=request.sampling.seed + 1)
        self._engine.submit(replace(request, sampling=sampling))


def load(folder: Path = LARGE, scheme: str | None = None) -> DecoderModel:
    rounding = None if scheme is None else Rounding(scheme=scheme)
    return DecoderModel.load(str(folder), dtype="bfloat16", deterministic=True, rounding=rounding)


honest_model = cache(load)


def engine_of(model: DecoderModel) -> Engine:
    model.numerics, model.fingerprint = honest_model().numerics, honest_model().fingerprint
    return make_engine(replace(shipped_pair("bfloat16"), large=model), grammars=COMPILERS)


def honest() -> Engine:
    return engine_of(honest_model())


def in_eight_bits() -> Engine:
    return engine_of(load(scheme="int8"))


def with_a_flipped_bit(folder: Path) -> Engine:
    """One weight of the last norm is a sixteenth, or sixteen times, what it was."""
    shutil.copytree(LARGE, folder)
    weights = load_file(folder / "model.safetensors")
    bits = weights["model.norm.weight"].view(torch.int16)
    bits[100] ^= 4 << 7
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return engine_of(load(folder))


def wrong(kind: str, folder: Path) -> Callable[[], object]:
    match kind:
        case "a flipped bit":
            return lambda: with_a_flipped_bit(folder)
        case "eight bits":
            return in_eight_bits
    return lambda: OtherRule(honest())


def one_by_one(build: Callable[[], object]) -> object:
    with LOADING:
        return build()


@asynccontextmanager
async def fleet(*builders: Callable[[], object]) -> AsyncIterator[EnginePool]:
    """Replicas a, b, c, …"""
    replicas = [
        EngineReplica(name, InProcessEngineClient(lambda _, build=build: one_by_one(build)))
        for name, build in zip("abcdef", builders, strict=False)
    ]
    async with started(EnginePool(replicas, audits=POLICY)) as pool:
        await all_up(pool)
        yield pool


async def audited(pool: EnginePool, requests: list[EngineRequest]) -> Counter[tuple[str, str]]:
    """Have requests answered, and what can be audited audited; return the counts."""
    await asyncio.gather(*(Reader(pool, request).rest() for request in requests))
    await becomes(lambda: not pool.audits.num_kept)
    return Counter({(name, word): count for name, word, count in pool.audits.counts()})


def sampled(turn: int, count: int = 30) -> list[EngineRequest]:
    """Requests whose answers have many near ties."""
    return [
        make_request(f"{turn}/{n}", prompt, max_tokens=48, temperature=1.5, seed=100 * turn + n)
        for n, prompt in enumerate(heldout_prompts(count, seed=turn))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a flipped bit", "eight bits", "another rule"])
async def test_a_wrong_replica_is_found_and_taken_out(kind: str, tmp_path: Path) -> None:
    async with fleet(wrong(kind, tmp_path / "wrong"), honest, honest) as pool:
        for turn in range(8):
            found = await audited(pool, sampled(turn))
            if found["a", "removed"]:
                break
        assert (found["a", "removed"], found["b", "odd"], found["c", "odd"]) == (1, 0, 0)
        assert [state.is_draining for state in pool.states()] == [True, False, False]
        again = await audited(pool, sampled(8, 6))
        assert again["a", "different"] == found["a", "different"]
        assert sum(again[name, "same"] - found[name, "same"] for name in "bc") == 6


@pytest.mark.slow
async def test_no_honest_replica_differs_whatever_shapes_an_answer() -> None:
    requests = requests_of()
    async with fleet(honest, honest, honest) as pool:
        found = await audited(pool, requests)
        num_judged = sum(request.cascade is None for request in requests)
        assert sum(found[name, "same"] for name in "abc") == num_judged
        assert {word for (_, word), count in found.items() if count} == {"same"}
        for turn in range(3):
            found = await audited(pool, sampled(turn))
        assert sum(found.values()) == num_judged + 90
        assert {word for (_, word), count in found.items() if count} == {"same"}
