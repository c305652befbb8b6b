"""Trains the router of the bundled pair anew, which `make router` calls.

Held-out tasks of the pair's world are answered by both models and checked, as `outrider router
collect` does it; what is labelled is kept in the work folder, so that an interrupted run goes on.
Then the grown pair, which `outrider serve` shows, answers some of them one by one: their processor
seconds give the rates of a request, a token of its prompt and a token of its answer. The router
learns from the labels and weighs gains by these seconds, as `outrider router train` does.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from outrider.draft.training.tasks.files import write_tasks
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.demo.grown_pair import kept_pair
from outrider.gateway.tools.learning.collect.collecting import Collector, CollectPlan
from outrider.gateway.tools.learning.collect.data import (
    CollectQuestion,
    LabelFile,
    read_questions,
)
from outrider.gateway.tools.learning.routers.weighing import weighed_router
from outrider.gateway.wiring import build as wiring
from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
from outrider.router.calibration import CalibrationTarget, needed
from outrider.router.dataset import LabelledPrompts, read_labelled_prompts
from outrider.router.estimator import TrainConfig, train_router
from outrider.router.features import FloatRows
from outrider.router.scorer import RouterScorer
from outrider.router.worth import CostRates
from outrider.router.worth_fit import fit_rates, fit_worth
from outrider.verifier.params import TIERS, Tier

logger = logging.getLogger(__name__)

_TASK_SEED: Final = 20_261_201
_NUM_TASKS: Final = 4000
_NUM_TIMED: Final = 64
_TARGET: Final = CalibrationTarget(quality=0.985)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswers:
    """Processor seconds of a tier's answers, one at a time; all [num_prompts]."""

    num_prompt_tokens: FloatRows
    num_answer_tokens: FloatRows
    seconds: FloatRows

    @property
    def rates(self) -> CostRates:
        """The rates that explain them best."""
        return fit_rates(self.num_prompt_tokens, self.num_answer_tokens, self.seconds)


@asynccontextmanager
async def _collecting(folder: Path, batch_size: int) -> AsyncIterator[Collector]:
    """A collector on the pair in a folder, with one thread."""
    settings = load_settings(
        flags={
            **{f"models.{tier}": str(folder / tier) for tier in TIERS},
            "engine.device": "cpu",
            "engine.num_threads": 1,
        },
        environ={},
    )
    client = InProcessEngineClient(lambda report: wiring.build_engine(settings, report))
    await client.start()
    try:
        plan = CollectPlan(batch_size=batch_size)
        yield Collector(client, await client.info(), _tokenizers(settings, folder), plan)
    finally:
        await client.close()


def _tokenizers(settings: Settings, folder: Path) -> Mapping[Tier, ChatTokenizer]:
    return {tier: load_chat_tokenizer(settings, tier, str(folder / tier)) for tier in TIERS}


async def label(questions: Sequence[CollectQuestion], path: Path) -> None:
    """Write the labels of the bundled pair's answers, or those that the file lacks."""
    async with _collecting(bundled_pair(), 32) as collector:
        labels = LabelFile(path, pair=collector.pair, small_weights=collector.small_weights)
        await collector.collect(questions, labels)


async def timed(questions: Sequence[CollectQuestion]) -> dict[Tier, TimedAnswers]:
    """Have the grown pair answer questions one by one, by both tiers in turn."""
    rows: dict[Tier, list[tuple[int, int, float]]] = {tier: [] for tier in TIERS}
    async with _collecting(kept_pair(logger.info), 1) as collector:
        for question in questions:
            for tier in TIERS:
                asked = await collector.prepare(question, tier)
                if asked is None:
                    continue
                started_s = time.process_time()
                answer = await collector.answer(asked)
                taken_s = time.process_time() - started_s
                num_tokens = len(asked.request.prompt_token_ids), len(answer.token_ids)
                rows[tier].append((*num_tokens, taken_s))
    columns = {tier: np.array(found, dtype=np.float64).T for tier, found in rows.items()}
    return {
        tier: TimedAnswers(num_prompt_tokens=prompt, num_answer_tokens=answer, seconds=seconds)
        for tier, (prompt, answer, seconds) in columns.items()
    }


def with_seconds(data: LabelledPrompts, rates: Mapping[Tier, CostRates]) -> LabelledPrompts:
    """Return labels with the seconds that the rates give their answers."""
    prompt = needed(data.num_prompt_tokens, "prompt_tokens")

    def seconds(tier: Tier, answer: FloatRows) -> FloatRows:
        rate = rates[tier]
        return rate.request + rate.prompt_token * prompt + rate.answer_token * answer

    return replace(
        data,
        weak_s=seconds("small", needed(data.num_weak_tokens, "weak_tokens")),
        strong_s=seconds("large", needed(data.num_strong_tokens, "strong_tokens")),
    )


def trained(data: LabelledPrompts) -> RouterScorer:
    """Return a router of these labels that weighs gains by their seconds."""
    plan = TrainConfig(target=_TARGET)
    found = train_router(data, plan)
    fitted = fit_worth(data, found.scorer.features, "second", None)
    return weighed_router(found.scorer, found.rows, fitted, plan.target)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the tasks, label, time, train and write."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--work", type=Path, default=Path("runs/router"), help="tasks and labels")
    parser.add_argument("--num-tasks", type=int, default=_NUM_TASKS)
    parser.add_argument("--num-timed", type=int, default=_NUM_TIMED)
    parser.add_argument("--seed", type=int, default=_TASK_SEED, help="of the tasks")
    arguments = parser.parse_args(argv)
    name = f"{arguments.seed}-{arguments.num_tasks}.jsonl"
    tasks, labels = (arguments.work / f"{kind}-{name}" for kind in ("tasks", "labels"))
    write_tasks(tasks, num_rows=arguments.num_tasks, seed=arguments.seed)
    questions = read_questions(tasks)
    logger.info("labelling tasks=%d", len(questions))
    asyncio.run(label(questions, labels))
    logger.info("timing answers tasks=%d", arguments.num_timed)
    answers = asyncio.run(timed(questions[: arguments.num_timed]))
    rates = {tier: found.rates for tier, found in answers.items()}
    logger.info("measured rates=%s", rates)
    data = with_seconds(read_labelled_prompts(labels), rates)
    trained(data).save(arguments.out)
    logger.info("wrote router=%s", arguments.out)


if __name__ == "__main__":
    main()
