"""Objectives decide when an answer comes, never what it says."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.queue.slo_queue import SloQueue
from outrider.engine.request import NO_OBJECTIVE, EngineRequest, LatencyObjective
from tests.engines import (
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.laws.mixed import mixed_requests, plainly, total

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


@pytest.mark.parametrize(
    ("large_blocks", "max_sequences", "tick_s"), [(256, 3, 0.02), (44, 64, 0.5), (60, 4, 0.02)]
)
def test_answers_do_not_depend_on_objectives(
    large_blocks: int, max_sequences: int, tick_s: float, right: dict[str, list[int]]
) -> None:
    requests = with_objectives(mixed_requests(), seed=large_blocks + max_sequences)
    requests = [replace(request, arrival_s=0.0) for request in requests]
    engine = make_engine(
        tiny_pair(),
        block_size=4,
        large_blocks=large_blocks,
        config=EngineConfig(max_sequences=max_sequences, min_prefill_tokens=4),
        policy=SloQueue(),
    )
    engine._clock = ticking(tick_s).__next__
    rng = random.Random(max_sequences)
    arrivals = {request.request_id: rng.randrange(12) for request in requests}
    answers = serve(engine, requests, arrivals=arrivals)
    assert texts(answers) == right
    assert_idle(engine)


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
    alone = plainly(shipped_pair(), [*batch, *chats])
    asked = [replace(r, objective=LatencyObjective(is_batch=True)) for r in batch]
    asked += [replace(r, objective=LatencyObjective(ttft_s=5.0, inter_token_s=0.1)) for r in chats]
    engine = make_engine(shipped_pair(), config=EngineConfig(max_sequences=3), policy=SloQueue())
    engine._clock = ticking(0.25).__next__
    arrivals = {request.request_id: 2 + n for n, request in enumerate(chats)}
    answers = serve(engine, asked, arrivals=arrivals)
    assert texts(answers) == alone
    assert total(answers, "num_preemptions") > 0
    assert_idle(engine)
