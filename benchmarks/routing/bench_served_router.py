"""What do a router's answers cost beside always-large, asked end to end through a gateway?

Method: held-out tasks of the demo pair's world with a seed of their own (those without tools, and
that the router was not trained on) go to `outrider serve` with the pair as it is: to the large
model, then to `auto` with streams, where the first 16 tokens of a small answer are judged, then to
`auto` without, where whole answers are. The tasks' own checkers judge what the client reads. What
was spent is counted, not timed: the gateway's ledger says for every attempt, answers begun in vain
included, how many tokens of prompt and answer which model had. Prompts count in full, cached or
not, because the same tasks are asked three times. So neighbours on the machine change nothing; to
that end the hold ends after 16 tokens alone, and a queue does not raise the bar.

Reading it: `tokens`: each weighs its model's parameters. `seconds`: virtual ones, of the rates in
the router's file, which were measured on the grown pair (150 M and 15 M parameters, 10 to 1). Both
as shares of always-large's. `minus large`: accuracy minus always-large's with a 95 % interval of a
paired bootstrap over tasks. Goal: within one point at 0.60 of the seconds.

    python -m benchmarks.routing.bench_served_router
"""

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from benchmarks.routing.bench_routing_quality import questions_for
from benchmarks.routing.routing_policies import mean_interval
from benchmarks.routing.routing_runs import HOLD_BACK_TOKENS
from benchmarks.routing.routing_worth import GOAL_COST, MARGIN
from benchmarks.shared.harness import (
    CACHE,
    argument_parser,
    console,
    prepare,
    progress_bar,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.intervals import Interval
from benchmarks.shared.upstream_servers import Server, gateway_server
from outrider.gateway.settings.tree import bundled_pair
from outrider.gateway.tools.learning.collect.data import CollectQuestion
from outrider.router.features import FloatRows
from outrider.router.scorer import RouterScorer
from outrider.router.worth import PairRates

_TASK_SEED: Final = 20_261_121
_CLIENTS: Final = 8
_PARAMETERS: Final = {"small": 705_152, "large": 6_820_096}
_SETTLE_S: Final = 0.5
_WAYS: Final = {
    "always large": ("large", True),
    "auto, streamed": ("auto", True),
    "auto, whole": ("auto", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A row of the ledger."""

    kind: str
    tier: str
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFigures:
    """A way of answering all tasks."""

    accuracy: Interval
    minus_large: Interval
    large_share: float
    """Of the answers."""
    begun_in_vain: float
    """Answers of the small model that the large one took over, as a share of the tasks."""
    tokens: float
    seconds: float


async def ask(server: Server, questions: Sequence[CollectQuestion], way: str) -> tuple[Any, Any]:
    """Return whether each answer is right, and whether the large model gave it."""
    model, streams = _WAYS[way]
    right, by_large = np.zeros(len(questions)), np.zeros(len(questions))
    slots = asyncio.Semaphore(_CLIENTS)
    async with httpx.AsyncClient(timeout=300) as client:
        with progress_bar(way, len(questions)) as advance:

            async def one(place: int, question: CollectQuestion) -> None:
                body = {
                    "model": model,
                    "messages": [
                        message.model_dump(exclude_none=True)
                        for message in question.request.messages
                    ],
                    "temperature": 0,
                    "max_tokens": 256,
                    "stream": streams,
                }
                async with slots:
                    answer = await client.post(f"{server.url}/chat/completions", json=body)
                answer.raise_for_status()
                text, tier = read_answer(answer, streams=streams)
                is_right = question.check.is_right
                right[place] = is_right is not None and is_right(text)
                by_large[place] = tier == "large"
                advance(f"{right.sum() / (place + 1):.0%}")

            await asyncio.gather(*(one(*each) for each in enumerate(questions)))
    return right, by_large


def read_answer(answer: httpx.Response, *, streams: bool) -> tuple[str, str]:
    """Return the text and the model that wrote it: a stream's headers are those of its start."""
    if not streams:
        message = answer.json()["choices"][0]["message"]
        return message["content"] or "", answer.headers["x-outrider-tier"]
    chunks = [
        msgspec.json.decode(line[6:])
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    pieces = [
        choice.get("delta", {}).get("content") or ""
        for chunk in chunks
        for choice in chunk.get("choices") or ()
    ]
    return "".join(pieces), answer.headers["x-outrider-tier"]


def attempts(database: Path, num_requests: int) -> list[Attempt]:
    """Return the ledger's rows, once those of all requests are there."""
    query = (
        "select kind, tier, num_prompt_tokens, num_completion_tokens from ledger "
        "order by ended_at, row_id"
    )
    before = -1
    while True:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as ledger:
            (requests,) = ledger.execute("select count(distinct request_id) from ledger").fetchone()
            rows = ledger.execute(query).fetchall()
        if requests >= num_requests and len(rows) == before:
            break
        before = len(rows)
        time.sleep(_SETTLE_S)
    return [
        Attempt(kind=kind, tier=tier, num_prompt_tokens=prompt, num_completion_tokens=answer)
        for kind, tier, prompt, answer in rows
    ]


def token_cost(found: Sequence[Attempt]) -> float:
    """Tokens times the parameters that they went through; guesses are part of the large model."""
    return sum(
        _PARAMETERS[one.tier] * (one.num_prompt_tokens + one.num_completion_tokens)
        for one in found
        if one.kind != "draft"
    )


def seconds_of(found: Sequence[Attempt], rates: PairRates) -> float:
    """Virtual seconds by the rates; those of the large model were measured with guesses."""
    by_tier = {"small": rates.small, "large": rates.large}
    return sum(
        by_tier[one.tier].cost(one.num_prompt_tokens, one.num_completion_tokens)
        for one in found
        if one.kind != "draft"
    )


def figures_of(
    answers: Mapping[str, tuple[FloatRows, FloatRows]],
    spent: Mapping[str, Sequence[Attempt]],
    rates: PairRates,
) -> dict[str, WayFigures]:
    """By way; costs are shares of always-large's."""
    large, _ = answers["always large"]
    tokens, seconds = (
        cost(spent["always large"]) for cost in (token_cost, lambda found: seconds_of(found, rates))
    )
    return {
        way: WayFigures(
            accuracy=mean_interval(right),
            minus_large=mean_interval(right - large),
            large_share=float(by_large.mean()),
            begun_in_vain=sum(one.kind == "escalation" for one in spent[way]) / len(right),
            tokens=token_cost(spent[way]) / tokens,
            seconds=seconds_of(spent[way], rates) / seconds,
        )
        for way, (right, by_large) in answers.items()
    }


def run(arguments: argparse.Namespace, questions: Sequence[CollectQuestion]) -> dict[str, Any]:
    """Ask every way, and count."""
    scorer = RouterScorer.load(arguments.rates or arguments.router)
    if scorer.worth is None or scorer.worth.model.seconds is None:
        raise SystemExit(f"{arguments.router} has no rates in seconds; name one that has: --rates")
    rates = scorer.worth.model.seconds
    answers: dict[str, tuple[FloatRows, FloatRows]] = {}
    spent: dict[str, Sequence[Attempt]] = {}
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "ledger.db"
        options = [
            *("--large", str(arguments.large), "--small", str(arguments.small)),
            *("--router", str(arguments.router), "--dtype", arguments.dtype),
            *(
                "--set",
                f"database_url=sqlite:///{database}",
                "--set",
                "routing.hold_back_ms=600000",
            ),
            *("--set", "routing.max_busy_factor=1"),
        ]
        with gateway_server([], options=options) as server:
            before: list[Attempt] = []
            for number, way in enumerate(_WAYS, start=1):
                answers[way] = asyncio.run(ask(server, questions, way))
                rows = attempts(database, number * len(questions))
                spent[way], before = rows[len(before) :], rows
    figures = figures_of(answers, spent, rates)
    return {
        "num_prompts": len(questions),
        "task_seed": arguments.task_seed,
        "hold_back_tokens": HOLD_BACK_TOKENS,
        "parameters": _PARAMETERS,
        "second_rates": rates,
        "ways": figures,
        "goal": {
            "seconds": GOAL_COST,
            "margin": MARGIN,
            "met": {
                way: found.seconds <= GOAL_COST and found.minus_large.estimate >= -MARGIN
                for way, found in figures.items()
            },
        },
    }


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    ways: Mapping[str, WayFigures] = results["ways"]
    show_table(
        f"{results['num_prompts']} tasks through a gateway",
        ["answered by", "right", "minus large", "large", "begun in vain", "tokens", "seconds"],
        [
            [
                way,
                f"{found.accuracy.estimate:.1%}",
                f"{found.minus_large.estimate:+.1%} "
                f"({found.minus_large.low:+.1%} to {found.minus_large.high:+.1%})",
                f"{found.large_share:.1%}",
                f"{found.begun_in_vain:.1%}",
                f"{found.tokens:.3f}",
                f"{found.seconds:.3f}",
            ]
            for way, found in ways.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, count, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--rates", type=Path, help="router with the rates, where ROUTER has none")
    parser.add_argument("--num-prompts", type=int, default=1000, help="held-out tasks")
    parser.add_argument("--task-seed", type=int, default=_TASK_SEED)
    parser.set_defaults(dtype="bfloat16")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    scorer = RouterScorer.load(arguments.router)
    asked = questions_for(arguments, scorer, CACHE / "served-router")
    questions = [question for question in asked if not question.request.tools]
    results = run(arguments, questions)
    show(results)
    path = write_results("bench_served_router", variant_name(arguments), results, arguments)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    start(main)
