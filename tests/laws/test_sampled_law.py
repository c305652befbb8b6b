"""Same seed, same text: speculation, batch, blocks and arrival change nothing.

The law is checked on tiny random models with one mixed batch of requests: greedy and sampled, short
prompts and long ones. The right answers come from plain decoding, alone, with blocks to spare.
"""

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.request import EngineRequest, SpeculationParams
from tests.engines import (
    Answer,
    fixed_budget,
    heldout_prompts,
    make_request,
    random_prompt,
    scripted_drafter,
    shipped_pair,
    tiny_pair,
)
from tests.laws.mixed import SAMPLINGS, mixed_requests
from tests.laws.same_answers import (
    ACCEPTING,
    COLD,
    WARM,
    Way,
    assert_same_answers,
    by,
    plainly,
    serve_in,
)
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


# All prompts in one pass, however slow the machine: steps are counted.
IN_ONE_PASS = EngineConfig(min_prefill_tokens=EngineConfig().max_tokens_per_step)


@pytest.mark.slow
@pytest.mark.parametrize("config", slow_but({"default", "chain", "wide"}, DRAFTS))
def test_the_tree_does_not_matter(config: DraftConfig) -> None:
    served = assert_same_answers(mixed_requests(), vary=ACCEPTING | by(draft=config))
    assert served.total("num_accepted_tokens") <= served.total("num_drafted_tokens")
    assert served.total("num_steps") < served.total("num_output_tokens")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("chance_right", "num_levels", "branching"),
    [(0.0, 4, 3), (0.5, 1, 1), (0.5, 4, 3), (0.5, 9, 2), (1.0, 1, 1), (1.0, 9, 2)],
)
def test_the_drafter_does_not_matter(chance_right: float, num_levels: int, branching: int) -> None:
    right = plainly(tiny_pair(), mixed_requests())
    assert all(len(set(tokens)) > 4 for tokens in right.values())  # no model that loops
    drafter = scripted_drafter(
        right, chance_right=chance_right, num_levels=num_levels, branching=branching
    )
    served = assert_same_answers(mixed_requests(), vary=by(drafter=drafter, config=IN_ONE_PASS))
    if chance_right == 0.0:
        assert served.total("num_accepted_tokens") == 0
        assert served.total("num_steps") == served.total("num_output_tokens")
    elif chance_right == 1.0:
        # Every step but the last of an answer yields a whole path and the next token.
        steps = [-(-(len(tokens) - 1) // (num_levels + 1)) + 1 for tokens in right.values()]
        assert served.total("num_steps") == sum(steps)


def test_guessing_at_random_does_no_harm() -> None:
    nothing: dict[str, list[int]] = {request.request_id: [] for request in mixed_requests()}
    drafter = scripted_drafter(nothing, chance_right=0.0, branching=12, num_levels=3)
    served = assert_same_answers(mixed_requests(), vary=ACCEPTING | by(drafter=drafter))
    assert served.total("num_accepted_tokens") < served.total("num_drafted_tokens") / 10


@pytest.mark.slow_cases
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
def test_a_requests_own_limits_hold_and_do_not_matter(speculation: SpeculationParams) -> None:
    answers = assert_same_answers(mixed_requests(speculation=speculation)).answers
    limit = speculation.max_draft_nodes
    drafted = [event.num_drafted_tokens for a in answers.values() for event in a.emitted]
    accepted = [event.num_accepted_tokens for a in answers.values() for event in a.emitted]
    if not speculation.enabled or limit == 0:
        assert max(drafted) == 0
    else:
        assert 0 < max(drafted) <= min(limit or 64, 64)
        assert max(accepted) <= (speculation.max_draft_depth or 255)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target_row_s", "draft_pass_s"), [(0.0, 0.05), (0.02, 0.05), (0.2, 0.05), (0.02, 10.0)]
)
def test_the_budget_does_not_matter(target_row_s: float, draft_pass_s: float) -> None:
    budget = fixed_budget(row=target_row_s, draft=draft_pass_s)
    vary = by(budget=budget, draft=DraftConfig(sources=("model",)))
    served = assert_same_answers(mixed_requests(), vary=vary)
    assert (served.total("num_drafted_tokens") == 0) == (draft_pass_s > 1.0)


# ---- company --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "prefix_caching"), [(1, True), (4, True), (4, False), (16, True), (32, False)]
)
def test_blocks_do_not_matter(block_size: int, prefix_caching: bool) -> None:
    num_blocks = 4096 // block_size
    blocks = by(block_size=block_size, large_blocks=num_blocks, small_blocks=num_blocks)
    vary = (WARM if prefix_caching else COLD | Way(turns=2)) | blocks
    served = assert_same_answers(mixed_requests(), vary=vary)
    assert (served.total("num_cached_tokens") > 0) == prefix_caching


@pytest.mark.slow
def test_alone_or_in_company_is_the_same() -> None:
    for request in mixed_requests():
        assert_same_answers([request])


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens_per_step", "gap"), [(4, 1), (16, 1), (16, 3), (2048, 3)])
def test_joining_late_and_prefill_in_chunks_do_not_matter(
    max_tokens_per_step: int, gap: int
) -> None:
    config = EngineConfig(max_tokens_per_step=max_tokens_per_step, min_prefill_tokens=2)
    requests = mixed_requests()
    mixed = requests[::2] + requests[1::2]  # the long prompts come between the short ones
    assert_same_answers(mixed, vary=by(config=config) | Way(arrive=lambda number: gap * number))


@pytest.mark.slow
def test_a_prompt_in_chunks_beside_answers_that_stream() -> None:
    """Prefill chunks bounded by time: every pass takes far longer than is affordable."""
    chunks = by(config=EngineConfig(prefill_chunk_s=1e-9, min_prefill_tokens=5))
    one_by_one = Way(arrive=lambda number: number)
    served = assert_same_answers(mixed_requests(), vary=chunks | one_by_one)
    slowest = served.answers["r11"].stats  # 130 tokens, five a pass
    assert slowest.ttft_s is not None
    assert served.engine.stats().num_steps > 130 / 5


@pytest.mark.slow
def test_small_answers_alongside_do_not_matter() -> None:
    small = [
        make_request(
            f"small{number}", random_prompt(20 + number, seed=90 + number), tier="small",
            temperature=0.9, seed=number,
        )
        for number in range(6)
    ]  # fmt: skip
    late = Way(arrive=lambda number: 2 * max(0, number - len(mixed_requests())))
    for small_blocks in (256, 24):
        assert_same_answers(mixed_requests() + small, vary=late | by(small_blocks=small_blocks))


# ---- other models ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", law_architectures(pytest.mark.long))
def test_every_architecture_keeps_the_law(architecture: str) -> None:
    """Also those with sliding windows, where a tree node's window follows its depth.

    The others' greedy answers are compared in test_greedy_law, speculation and all.
    """
    pair = tiny_pair(architecture, max_positions=256)
    vary = ACCEPTING | by(draft=DraftConfig(max_branching=4))
    assert_same_answers(mixed_requests(), of=pair, vary=vary)


def pair_requests() -> list[EngineRequest]:
    return [
        make_request(
            f"r{number}", prompt, max_tokens=32, seed=number, **SAMPLINGS[number % len(SAMPLINGS)]
        )
        for number, prompt in enumerate(heldout_prompts(14))
    ]


@pytest.fixture(scope="module")
def right_of_pair() -> dict[str, Answer]:
    return serve_in(by(speculates=False), pair_requests(), shipped_pair()).answers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "chain", "wide"])
def test_the_shipped_pair_keeps_the_law(name: str, right_of_pair: dict[str, Answer]) -> None:
    vary = ACCEPTING | by(draft=DRAFTS[name])
    assert_same_answers(pair_requests(), of=shipped_pair(), vary=vary, right=right_of_pair)
