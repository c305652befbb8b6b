"""Same seed, same text: speculation, batch, blocks and arrival change nothing.

The law is checked on tiny random models with one mixed batch of requests: greedy and sampled, short
prompts and long ones. The right answers come from plain decoding, alone, with blocks to spare.
"""

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest, SpeculationParams
from tests.engines import (
    FixedTimes,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    scripted_drafter,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.laws.mixed import LENGTHS, SAMPLINGS, mixed_requests, plainly, total
from tests.models import law_architectures
from tests.sizes import slow_but

# ---- trees ----------------------------------------------------------------------------------

DRAFTS = {
    "default": DraftConfig(),
    "chain": DraftConfig(max_branching=1, max_frontier=1, min_path_prob=0.0),
    "one-node": DraftConfig(max_draft_nodes=1),
    "one-level": DraftConfig(max_draft_depth=1, max_branching=8),
    "wide": DraftConfig(max_branching=12, max_frontier=16, max_draft_nodes=120),
    "deep": DraftConfig(max_draft_depth=40, max_frontier=2, min_path_prob=0.0),
    "everything": DraftConfig(
        max_branching=16, max_frontier=16, max_draft_nodes=255, min_path_prob=0.0
    ),
    "short-catch-up": DraftConfig(max_catch_up_tokens=7),
}


@pytest.mark.parametrize("config", slow_but({"default", "chain", "wide"}, DRAFTS))
def test_the_tree_does_not_matter(config: DraftConfig, right: dict[str, list[int]]) -> None:
    engine = make_engine(tiny_pair(), draft=config)
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert 0 < total(answers, "num_accepted_tokens") <= total(answers, "num_drafted_tokens")
    assert total(answers, "num_steps") < total(answers, "num_output_tokens")
    assert_idle(engine)


@pytest.mark.parametrize(
    ("chance_right", "num_levels", "branching"),
    [(0.0, 4, 3), (0.5, 1, 1), (0.5, 4, 3), (0.5, 9, 2), (1.0, 1, 1), (1.0, 9, 2)],
)
def test_the_drafter_does_not_matter(
    chance_right: float, num_levels: int, branching: int, right: dict[str, list[int]]
) -> None:
    drafter = scripted_drafter(
        right, chance_right=chance_right, num_levels=num_levels, branching=branching
    )
    # All prompts in one pass, however slow the machine: steps are counted.
    in_one_pass = EngineConfig(min_prefill_tokens=EngineConfig().max_tokens_per_step)
    engine = make_engine(tiny_pair(), drafter=drafter, config=in_one_pass)
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    accepted, output = total(answers, "num_accepted_tokens"), total(answers, "num_output_tokens")
    if chance_right == 0.0:
        assert accepted == 0
        assert total(answers, "num_steps") == output
    elif chance_right == 1.0:
        # Every step but the last of an answer yields a whole path and the next token.
        steps = [-(-(len(tokens) - 1) // (num_levels + 1)) + 1 for tokens in right.values()]
        assert total(answers, "num_steps") == sum(steps)


def test_guessing_at_random_does_no_harm(right: dict[str, list[int]]) -> None:
    nobody = {f"r{number}": [] for number in range(len(LENGTHS))}
    drafter = scripted_drafter(nobody, chance_right=0.0, branching=12, num_levels=3)
    answers = serve(make_engine(tiny_pair(), drafter=drafter), mixed_requests())
    assert texts(answers) == right
    assert 0 < total(answers, "num_accepted_tokens") < total(answers, "num_drafted_tokens") / 10


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(max_draft_nodes=3),
        SpeculationParams(max_draft_depth=2),
        SpeculationParams(max_draft_nodes=0),
        SpeculationParams(max_draft_nodes=255, max_draft_depth=255),
        SpeculationParams(enabled=False),
    ],
)
def test_a_requests_own_limits_hold_and_do_not_matter(
    speculation: SpeculationParams, right: dict[str, list[int]]
) -> None:
    answers = serve(make_engine(tiny_pair()), mixed_requests(speculation=speculation))
    assert texts(answers) == right
    limit = speculation.max_draft_nodes
    drafted = [event.num_drafted_tokens for a in answers.values() for event in a.emitted]
    accepted = [event.num_accepted_tokens for a in answers.values() for event in a.emitted]
    if not speculation.enabled or limit == 0:
        assert max(drafted) == 0
    else:
        assert 0 < max(drafted) <= min(limit or 64, 64)
        assert max(accepted) <= (speculation.max_draft_depth or 255)


@pytest.mark.parametrize(
    ("target_row_s", "draft_pass_s"), [(0.0, 0.05), (0.02, 0.05), (0.2, 0.05), (0.02, 10.0)]
)
def test_the_budget_does_not_matter(
    target_row_s: float, draft_pass_s: float, right: dict[str, list[int]]
) -> None:
    pair = tiny_pair()
    small = ModelRunner(model=pair.small, num_blocks=256)
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 1.0 + target_row_s * rows),
        draft_pass_s=FixedTimes(lambda rows: draft_pass_s),
    )
    engine = Engine(
        runners={"large": ModelRunner(model=pair.large, num_blocks=256), "small": small},
        drafter=TreeDrafter(runner=small, budget=budget, config=DraftConfig(sources=("model",))),
    )
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert (total(answers, "num_drafted_tokens") == 0) == (draft_pass_s > 1.0)


# ---- company --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "prefix_caching"), [(1, True), (4, True), (4, False), (16, True), (32, False)]
)
def test_blocks_do_not_matter(
    block_size: int, prefix_caching: bool, right: dict[str, list[int]]
) -> None:
    engine = make_engine(
        tiny_pair(),
        block_size=block_size,
        large_blocks=4096 // block_size,
        small_blocks=4096 // block_size,
        prefix_caching=prefix_caching,
    )
    requests = mixed_requests()
    assert texts(serve(engine, requests)) == right
    again = serve(engine, requests)  # now with every prompt in the cache
    assert texts(again) == right
    assert (total(again, "num_cached_tokens") > 0) == prefix_caching
    assert_idle(engine)


def test_alone_or_in_company_is_the_same(right: dict[str, list[int]]) -> None:
    alone: dict[str, list[int]] = {}
    for request in mixed_requests():
        alone |= texts(serve(make_engine(tiny_pair()), [request]))
    assert alone == right


@pytest.mark.parametrize(("max_tokens_per_step", "gap"), [(4, 1), (16, 1), (16, 3), (2048, 3)])
def test_joining_late_and_prefill_in_chunks_do_not_matter(
    max_tokens_per_step: int, gap: int, right: dict[str, list[int]]
) -> None:
    config = EngineConfig(max_tokens_per_step=max_tokens_per_step, min_prefill_tokens=2)
    engine = make_engine(tiny_pair(), config=config)
    requests = mixed_requests()
    # the long prompts come between the short ones
    order = [request.request_id for request in requests[::2] + requests[1::2]]
    arrivals = {request_id: gap * number for number, request_id in enumerate(order)}
    assert texts(serve(engine, requests, arrivals=arrivals)) == right
    assert_idle(engine)


def test_a_prompt_in_chunks_beside_answers_that_stream(right: dict[str, list[int]]) -> None:
    """Prefill chunks bounded by time: every pass takes far longer than is affordable."""
    config = EngineConfig(prefill_chunk_s=1e-9, min_prefill_tokens=5)
    engine = make_engine(tiny_pair(), config=config)
    requests = mixed_requests()
    arrivals = {request.request_id: number for number, request in enumerate(requests)}
    answers = serve(engine, requests, arrivals=arrivals)
    assert texts(answers) == right
    slowest = answers["r11"].stats  # 130 tokens, five a pass
    assert slowest.ttft_s is not None
    assert engine.stats().num_steps > 130 / 5


def test_small_answers_alongside_do_not_matter(right: dict[str, list[int]]) -> None:
    requests = mixed_requests()
    small = [
        make_request(
            f"small{number}", random_prompt(20 + number, seed=90 + number), tier="small",
            temperature=0.9, seed=number,
        )
        for number in range(6)
    ]  # fmt: skip
    expected = right | plainly(tiny_pair(), small)
    arrivals = {request.request_id: 2 * number for number, request in enumerate(small)}
    for small_blocks in (256, 24):
        engine = make_engine(tiny_pair(), small_blocks=small_blocks)
        answers = serve(engine, requests + small, arrivals=arrivals)
        assert texts(answers) == expected
        assert_idle(engine)


# ---- other models ---------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", law_architectures(pytest.mark.long))
def test_every_architecture_keeps_the_law(architecture: str) -> None:
    """Also those with sliding windows, where a tree node's window follows its depth.

    The others' greedy answers are compared in test_greedy_law, speculation and all.
    """
    pair = tiny_pair(architecture, max_positions=256)
    requests = mixed_requests()
    answers = serve(make_engine(pair, draft=DraftConfig(max_branching=4)), requests)
    assert texts(answers) == plainly(pair, requests)
    assert total(answers, "num_accepted_tokens") > 0


def pair_requests(speculation: bool) -> list[EngineRequest]:
    return [
        make_request(
            f"r{number}", prompt, max_tokens=32, seed=number, speculation=speculation,
            **SAMPLINGS[number % len(SAMPLINGS)],
        )
        for number, prompt in enumerate(heldout_prompts(14))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def right_of_pair() -> dict[str, list[int]]:
    engine = make_engine(shipped_pair(), speculates=False)
    return texts(serve(engine, pair_requests(speculation=False)))


@pytest.mark.parametrize("name", ["default", "chain", "wide"])
def test_the_shipped_pair_keeps_the_law(name: str, right_of_pair: dict[str, list[int]]) -> None:
    engine = make_engine(shipped_pair(), draft=DRAFTS[name])
    answers = serve(engine, pair_requests(speculation=True))
    assert texts(answers) == right_of_pair
    assert total(answers, "num_accepted_tokens") > 0
