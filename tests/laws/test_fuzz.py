"""Everything at once: random engines, requests, arrivals, aborts and tier switches.

Prompts are beginnings of a few texts, so that prefix hits of every length happen. Each case is a
function of its number: a failure names the number, and running it alone repeats it.
"""

import random
from functools import cache

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    assert_idle,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    tiny_pair,
)
from tests.sizes import repeats

MAX_PROMPT, MAX_TOKENS = 60, 24


@cache
def plain_text(prompt: tuple[int, ...], tier: Tier, temperature: float, seed: int) -> list[int]:
    """The longest answer; a shorter one is its beginning."""
    engine = make_engine(tiny_pair(), speculates=False, prefix_caching=False)
    request = make_request(
        "r", prompt, tier=tier, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed
    )
    return serve(engine, [request])["r"].token_ids


def random_request(rng: random.Random, request_id: str) -> EngineRequest:
    prompt = random_prompt(MAX_PROMPT, seed=rng.randrange(3))[: rng.randrange(1, MAX_PROMPT)]
    return make_request(
        request_id,
        prompt,
        tier=rng.choice(["large", "large", "small"]),
        max_tokens=rng.randrange(1, MAX_TOKENS + 1),
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(2),
        speculation=SpeculationParams(
            enabled=rng.random() < 0.8,
            max_draft_nodes=rng.choice([None, None, 1, 5]),
            max_draft_depth=rng.choice([None, None, 2]),
        ),
        cache_salt=rng.choice(["", "", "tenant"]),
        group_id=rng.choice([None, None, request_id[0]]),
    )


def check_case(number: int) -> None:
    rng = random.Random(number)
    block_size = rng.choice([1, 2, 4, 16])
    fewest = -(-(MAX_PROMPT + MAX_TOKENS) // block_size)
    engine = make_engine(
        tiny_pair(),
        block_size=block_size,
        large_blocks=fewest + rng.choice([0, 1, 3, fewest, 10 * fewest]),
        small_blocks=fewest + rng.choice([0, 1, 3, fewest, 10 * fewest]),
        prefix_caching=rng.random() < 0.8,
        on_device=number % 2 == 1,
        # Half of them read several prompts with both models at once.
        budget=fixed_budget(draft=0.04, draft_row=0.01) if number // 2 % 2 else None,
        drafter_clock=lambda: 0.0,
        config=EngineConfig(
            max_sequences=rng.choice([2, 5, 64]),
            max_tokens_per_step=rng.choice([3, 17, 64, 2048]),
            min_prefill_tokens=rng.choice([1, 64]),
            prefill_chunk_s=rng.choice([1e-9, 0.1]),
            min_small_passes=rng.choice([1, 4]),
            max_small_passes=rng.choice([4, 32]),
        ),
        draft=DraftConfig(
            max_draft_nodes=rng.choice([1, 7, 32, 100]),
            max_draft_depth=rng.choice([1, 3, 10]),
            max_branching=rng.choice([1, 2, 6]),
            max_frontier=rng.choice([1, 4, 9]),
            max_catch_up_tokens=rng.choice([5, 1024]),
        ),
    )
    requests = [random_request(rng, f"{n % 4}/{n}") for n in range(rng.randrange(1, 13))]
    tiers: dict[str, Tier] = {request.request_id: request.tier for request in requests}
    arrivals = {name: rng.randrange(15) for name in tiers}
    aborts = {rng.randrange(20): rng.choice(list(tiers)) for _ in range(rng.choice([0, 0, 2]))}
    switches = {rng.randrange(20): rng.choice(list(tiers)) for _ in range(rng.choice([0, 2, 6]))}

    def interfere(step: int, answers: dict[str, Answer]) -> None:
        if step in aborts:
            engine.abort(aborts[step])
        name = switches.get(step)
        if name is not None and name in engine._sequences:
            tiers[name] = "small" if tiers[name] == "large" else "large"
            engine.switch_tier(name, tiers[name])

    answers = serve(
        engine,
        requests,
        arrivals=arrivals,
        on_step=interfere,
        streams=rng.random() < 0.5,
        max_steps=5000,
    )
    for request in requests:
        answer, sampling = answers[request.request_id], request.sampling
        text = plain_text(
            request.prompt_token_ids, tiers[request.request_id], sampling.temperature, sampling.seed
        )
        if answer.finish_reason == "abort":
            assert answer.token_ids == text[: len(answer.token_ids)], number
        else:
            assert answer.token_ids == text[: sampling.max_tokens], number
    assert_idle(engine)


@pytest.mark.slow
def test_random_cases_keep_the_law() -> None:
    for number in range(repeats(40, 10)):
        check_case(number)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_cases_keep_the_law() -> None:
    for number in range(40, 10_000):
        check_case(number)
