"""The runs of bench_routing_quality on models: answers in batches, then single latencies."""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing.escalation import escalated, plain, watched
from benchmarks.routing.routing_policies import ESCALATED, LARGE, SMALL
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import console, progress_bar
from benchmarks.shared.turns import Turn
from outrider.engine.core import Engine
from outrider.engine.events import EngineInfo, TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.learning.collect.collecting import (
    Collector,
    CollectPlan,
    CollectProgress,
)
from outrider.gateway.tools.learning.collect.data import CollectQuestion, LabelFile
from outrider.gateway.wiring import build as wiring
from outrider.gateway.wiring import engine as engine_wiring
from outrider.gateway.wiring.drafter import measure_budget
from outrider.router.features import FloatRows
from outrider.verifier.params import CascadeParams, Tier

SPECULATIVE = "speculative cascade, alpha {alpha:g}"
HOLD_BACK_TOKENS = 16

_PAUSE_S = 0.02
_run_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Results of the batches."""

    path: Path
    kept: Sequence[CollectQuestion]
    """The questions that fit, in the order of `path`'s rows."""
    tiers: Mapping[Tier, TierInfo]
    pair: str | None
    speculative: Mapping[float, tuple[FloatRows, FloatRows]]
    """By alpha, scores and output tokens, one for each question of `kept`."""


def settings_for(arguments: argparse.Namespace, large: Path, small: Path) -> Settings:
    """As `outrider serve` would run this pair."""
    flags: dict[str, Any] = {
        "models.large": str(large),
        "models.small": str(small),
        "engine.device": arguments.device,
        "engine.dtype": arguments.dtype,
        "engine.num_threads": arguments.threads,
        # Long enough for every task, and no more memory than that takes.
        "engine.max_context": arguments.max_context,
    }
    return load_settings(flags=flags, environ={})


def tokenizers_for(settings: Settings) -> dict[Tier, ChatTokenizer]:
    """Load the tokenizers of both tiers."""
    resolved = settings.models.resolved()
    return {tier: ChatTokenizer.load(path) for tier, path in resolved.items() if path is not None}


@asynccontextmanager
async def collecting(
    arguments: argparse.Namespace,
) -> AsyncIterator[tuple[Collector, EngineInfo]]:
    """A collector on the pair as it is."""
    settings = settings_for(arguments, arguments.large, arguments.small)
    client = InProcessEngineClient(lambda report: wiring.build_engine(settings, report))
    with console.status("loading the pair"):
        await client.start()
    try:
        info = await client.info()
        plan = CollectPlan(max_tokens=arguments.max_new, batch_size=arguments.batch)
        yield Collector(client, info, tokenizers_for(settings), plan), info
    finally:
        await client.close()


def label(
    arguments: argparse.Namespace, questions: Sequence[CollectQuestion], folder: Path
) -> Labels:
    """Answers of both tiers, checked; kept in `folder`, so that another run has them already."""
    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_label(arguments, questions, folder))


async def _label(
    arguments: argparse.Namespace, questions: Sequence[CollectQuestion], folder: Path
) -> Labels:
    async with collecting(arguments) as (collector, info):
        name = f"{collector.pair}-{arguments.dtype}-{arguments.max_new}.jsonl"
        everything, path = folder / f"labels-{name}", folder / f"rows-{name}"
        out = LabelFile(everything, pair=collector.pair, small_weights=collector.small_weights)
        with progress_bar("labels", len(questions)) as advance:
            num_seen = 0

            def show(progress: CollectProgress) -> None:
                nonlocal num_seen
                for _ in range(progress.num_rows + progress.num_skipped - num_seen):
                    advance(
                        f"small {progress.weak_accuracy:.1%}, large {progress.strong_accuracy:.1%}"
                    )
                num_seen = progress.num_rows + progress.num_skipped

            await collector.collect(questions, out, show)
        kept = select_rows(everything, path, questions)
        speculative = {
            alpha: await _speculative(collector, kept, alpha, arguments.batch)
            for alpha in arguments.alphas
        }
    return Labels(
        path=path,
        kept=kept,
        tiers=info.tiers,
        pair=collector.pair,
        speculative=speculative,
    )


def select_rows(
    source: Path, path: Path, questions: Sequence[CollectQuestion]
) -> list[CollectQuestion]:
    """Write the questions' rows of a label file to `path`; returns those that have one, in order.

    The file may hold rows of earlier runs: with other seeds, or before another router was trained.
    """
    rows = {}
    with source.open(encoding="utf-8") as file:
        for line in file:
            rows[json.loads(line)["id"]] = line
    kept = [question for question in questions if question.digest in rows]
    path.write_text("".join(rows[question.digest] for question in kept), encoding="utf-8")
    return kept


async def _speculative(
    collector: Collector, questions: Sequence[CollectQuestion], alpha: float, batch: int
) -> tuple[FloatRows, FloatRows]:
    """Scores and output tokens of the speculative cascade, [num_questions]."""
    scores: list[float] = []
    tokens: list[float] = []
    with progress_bar(f"alpha {alpha:g}", len(questions)) as advance:
        for first in range(0, len(questions), batch):
            part = questions[first : first + batch]
            asked = [await collector.prepare(question, "large") for question in part]
            answers = await asyncio.gather(
                *(
                    collector.answer(
                        replace(
                            one,
                            request=replace(
                                one.request,
                                request_id=f"{one.request.request_id}-{alpha:g}",
                                cache_salt=f"alpha-{alpha:g}",
                                cascade=CascadeParams(alpha=alpha),
                            ),
                        )
                    )
                    for one in asked
                    if one is not None
                )
            )
            for question, answer in zip(part, answers, strict=True):
                assert question.check.is_right is not None
                scores.append(float(question.check.is_right(answer.text)))
                tokens.append(float(len(answer.token_ids)))
                advance(f"{np.mean(scores):.1%} right")
    return np.array(scores), np.array(tokens)


def latencies(
    arguments: argparse.Namespace, questions: Sequence[CollectQuestion]
) -> tuple[dict[str, FloatRows], EngineInfo]:
    """Seconds to the last token by way of answering, [num_questions], on the grown pair.

    One request at a time; each question is answered every way before the next one is asked.
    """
    settings = settings_for(arguments, grown_large(arguments), grown_small(arguments))
    with console.status("loading the grown pair, and profiling step times"):
        runners = engine_wiring.load_runners(settings, no_progress)
        budget = measure_budget(settings, runners, no_progress)
        engine = engine_wiring.join(settings, runners, budget)
    requests = asyncio.run(_requests(arguments, settings, engine, questions))
    ways = _ways(engine, arguments.alphas)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    with progress_bar("latency", (1 + len(requests)) * len(ways)) as advance:
        for name, way in ways.items():
            way(_fresh(requests[0]))
            advance(f"warm-up, {name}")
        for number, request in enumerate(requests):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(_PAUSE_S)
                seconds[name].append(ways[name](_fresh(request)))
                advance(name)
    return {name: np.array(values) for name, values in seconds.items()}, engine.info()


def _ways(engine: Engine, alphas: Sequence[float]) -> dict[str, Callable[[EngineRequest], float]]:
    def to_the_end(turn: Turn) -> float:
        # `plain` counts to the first token and from there.
        return turn.wall_s + turn.decode_s

    def large(request: EngineRequest, alpha: float | None = None) -> float:
        cascade = None if alpha is None else CascadeParams(alpha=alpha)
        return to_the_end(plain(engine, replace(request, tier="large", cascade=cascade)))

    ways: dict[str, Callable[[EngineRequest], float]] = {
        "small": lambda request: to_the_end(plain(engine, request)),
        "large": large,
        "escalated, prompt": lambda request: escalated(engine, watched(request), 1).wall_s,
        "escalated, answer": lambda request: (
            escalated(engine, watched(request), HOLD_BACK_TOKENS).wall_s
        ),
    }
    for alpha in alphas:
        ways[SPECULATIVE.format(alpha=alpha)] = partial(large, alpha=alpha)
    return ways


def by_way(seconds: Mapping[str, FloatRows], stage: str) -> dict[int, FloatRows]:
    """The ways of a policy: its escalations are those of the stage that decides them."""
    escalated_s = seconds["escalated, prompt" if stage == "prompt" else "escalated, answer"]
    return {SMALL: seconds["small"], LARGE: seconds["large"], ESCALATED: escalated_s}


async def _requests(
    arguments: argparse.Namespace,
    settings: Settings,
    engine: Engine,
    questions: Sequence[CollectQuestion],
) -> list[EngineRequest]:
    """Small-tier requests as the gateway would send them."""
    client = InProcessEngineClient(lambda _: engine)  # never started: it only fills in the type
    plan = CollectPlan(max_tokens=arguments.max_new)
    collector = Collector(client, engine.info(), tokenizers_for(settings), plan)
    requests = []
    for question in questions:
        asked = await collector.prepare(question, "small")
        assert asked is not None, "the grown model has the same context"
        sampling = replace(asked.request.sampling, num_logprobs=None)
        requests.append(replace(asked.request, sampling=sampling, return_hidden_state=False))
    return requests


def _fresh(request: EngineRequest) -> EngineRequest:
    """The same request with an id and a cache of its own."""
    name = f"run-{next(_run_numbers)}"
    return replace(request, request_id=name, cache_salt=name)
