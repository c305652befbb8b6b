"""Too few blocks change how long an answer takes, never what it says."""

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from tests.engines import Answer, make_engine, make_request, random_prompt, serve, tiny_pair
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import WARM, Way, assert_same_answers, by, few_blocks

FEWEST = 38  # of 4 tokens, for the longest request of the mixed batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spare_blocks", "small_blocks", "prefix_caching"),
    [
        (0, 1024, False),
        (20, 1024, True),
        (None, FEWEST, False),
        (None, 5, True),
        (0, FEWEST, True),
        (0, FEWEST, False),
        (10, 20, True),
    ],
)
def test_few_blocks_do_not_matter(
    spare_blocks: int | None, small_blocks: int, prefix_caching: bool
) -> None:
    """`spare_blocks`: None is room for all."""
    large = by(block_size=4, large_blocks=1024)
    if spare_blocks is not None:
        large = few_blocks(mixed_requests(), spare=spare_blocks)
    vary = large | by(small_blocks=small_blocks, prefix_caching=prefix_caching)
    served = assert_same_answers(mixed_requests(), vary=vary)
    counted = served.engine.stats().tiers["large"].num_preemptions
    assert served.total("num_preemptions") == counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "max_tokens_per_step"), [(1, 6), (1, 2048), (2, 2048), (3, 6)]
)
def test_small_blocks_and_small_chunks_under_pressure(
    block_size: int, max_tokens_per_step: int
) -> None:
    engine = by(
        block_size=block_size,
        large_blocks=-(-155 // block_size),
        small_blocks=-(-180 // block_size),
        config=EngineConfig(max_tokens_per_step=max_tokens_per_step, min_prefill_tokens=1),
        draft=DraftConfig(max_branching=6, max_frontier=8, max_draft_nodes=60),
    )
    shows = ("num_preemptions",) if max_tokens_per_step > 6 else ()
    vary = engine | Way(arrive=lambda number: number // 3, shows=shows)
    assert_same_answers(mixed_requests(), vary=vary)


@pytest.mark.slow
def test_both_tiers_under_pressure() -> None:
    """Drafts give way to small answers, small answers to older ones."""
    small = [
        make_request(
            f"small{number}", random_prompt(30 + 7 * number, seed=70 + number), tier="small",
            temperature=0.8 * (number % 2), seed=number, max_tokens=40,
        )
        for number in range(8)
    ]  # fmt: skip
    requests = [request for pair in zip(small, mixed_requests(), strict=False) for request in pair]
    requests += mixed_requests()[len(small) :]
    vary = few_blocks(requests, spare=4, small_blocks=36) | Way(arrive=lambda number: number // 2)
    stats = assert_same_answers(requests, vary=vary).engine.stats().tiers
    assert stats["large"].num_preemptions > 0
    assert stats["small"].num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_an_answer_that_fills_the_whole_cache_ends(block_size: int) -> None:
    """Prompt and answer take every slot of both pools, so trees have to shrink to the root."""
    request = make_request("r", random_prompt(40), max_tokens=24, temperature=0.8, seed=3)
    num_blocks = 64 // block_size
    blocks = by(block_size=block_size, large_blocks=num_blocks, small_blocks=num_blocks)
    served = assert_same_answers([request], vary=blocks | WARM)
    assert served.engine.stats().tiers["large"].num_preemptions == 0


def test_the_latest_arrival_gives_way_first() -> None:
    requests = [
        make_request(str(number), random_prompt(30, seed=number), max_tokens=30, speculation=False)
        for number in range(4)
    ]
    # Two fit to the end, three at first.
    engine = make_engine(tiny_pair(), block_size=4, large_blocks=36)
    ended: list[str] = []

    def watch(_: int, answers: dict[str, Answer]) -> None:
        ended.extend(n for n, a in answers.items() if a.finished and n not in ended)

    answers = serve(engine, requests, on_step=watch)
    preemptions = [answers[str(number)].stats.num_preemptions for number in range(4)]
    assert preemptions[:2] == [0, 0]
    assert preemptions[2] > 0
    assert [*ended, "3"] == ["0", "1", "2", "3"]  # first come, first served


@pytest.mark.slow
def test_reported_once_and_counted_although_preempted() -> None:
    requests = mixed_requests()
    engine = make_engine(tiny_pair(), block_size=4, large_blocks=FEWEST)
    answers = serve(engine, requests)
    assert sum(answer.stats.num_preemptions for answer in answers.values()) > 0
    for request in requests:
        answer = answers[request.request_id]
        assert len(answer.prefills) == 1
        assert answer.prefills[0].num_prompt_tokens == len(request.prompt_token_ids)
        assert answer.stats.num_output_tokens == request.sampling.max_tokens
    stats = engine.stats()
    assert stats.tiers["large"].num_output_tokens == sum(r.sampling.max_tokens for r in requests)
