"""Objectives decide when an answer comes, never what it says."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.queue.slo_queue import SloQueue
from outrider.engine.request import NO_OBJECTIVE, EngineRequest, LatencyObjective
from tests.engines import (
    heldout_prompts,
    make_request,
    shipped_pair,
)
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import Way, assert_same_answers, by

OBJECTIVES = (
    NO_OBJECTIVE,
    LatencyObjective(is_batch=True),
    LatencyObjective(is_batch=True),
    LatencyObjective(ttft_s=0.05),
    LatencyObjective(ttft_s=0.3, inter_token_s=0.01),
    LatencyObjective(ttft_s=60.0, inter_token_s=10.0),
    LatencyObjective(inter_token_s=0.001),
)


def with_objectives(requests: list[EngineRequest], seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        replace(request, objective=rng.choice(OBJECTIVES), tenant=rng.choice("aab"))
        for request in requests
    ]


def ticking(step_s: float) -> Iterator[float]:
    """A clock that goes on with every look, so that deadlines pass in few steps."""
    now_s = 0.0
    while True:
        now_s += step_s
        yield now_s


def slo_queue(*, tick_s: float, **engine: Any) -> Way:
    """An engine with the queue of objectives, whose clock goes on by so much with every look."""

    def watch(engine: Engine) -> None:
        engine._clock = ticking(tick_s).__next__

    return by(policy=SloQueue(), **engine) | Way(watch=watch)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("large_blocks", "max_sequences", "tick_s"), [(256, 3, 0.02), (44, 64, 0.5), (60, 4, 0.02)]
)
def test_answers_do_not_depend_on_objectives(
    large_blocks: int, max_sequences: int, tick_s: float
) -> None:
    requests = with_objectives(mixed_requests(), seed=large_blocks + max_sequences)
    requests = [replace(request, arrival_s=0.0) for request in requests]
    rng = random.Random(max_sequences)
    config = EngineConfig(max_sequences=max_sequences, min_prefill_tokens=4)
    queue = slo_queue(tick_s=tick_s, block_size=4, large_blocks=large_blocks, config=config)
    steps = [rng.randrange(12) for _ in requests]
    assert_same_answers(requests, vary=queue | Way(arrive=steps.__getitem__))


@pytest.mark.slow
def test_objectives_change_no_answer_of_the_shipped_pair() -> None:
    batch = [
        make_request(
            f"batch{n}", prompt, max_tokens=30, temperature=0.8 * (n % 2), seed=n, speculation=False
        )
        for n, prompt in enumerate(heldout_prompts(3))
    ]
    chats = [
        make_request(f"chat{n}", prompt, max_tokens=10, temperature=0.8 * (n % 2), seed=n)
        for n, prompt in enumerate(heldout_prompts(6)[3:])
    ]
    asked = [replace(r, objective=LatencyObjective(is_batch=True)) for r in batch]
    asked += [replace(r, objective=LatencyObjective(ttft_s=5.0, inter_token_s=0.1)) for r in chats]
    late = Way(arrive=lambda n: n - 1 if n > 2 else 0, shows=("num_preemptions",))
    vary = slo_queue(tick_s=0.25, config=EngineConfig(max_sequences=3)) | late
    assert_same_answers(asked, of=shipped_pair(), vary=vary)
