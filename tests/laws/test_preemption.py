"""Too few blocks change how long an answer takes, never what it says."""

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from tests.engines import (
    Answer,
    assert_idle,
    make_engine,
    make_request,
    random_prompt,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.mixed import mixed_requests, plainly, total

# The longest request of the mixed batch needs 130 prompt tokens and 21 more. Blocks are small, so
# that answers outgrow the room that admission kept for them.
BLOCK_SIZE = 4
FEWEST = 38


@pytest.mark.parametrize(
    ("large_blocks", "small_blocks", "prefix_caching"),
    [
        (FEWEST, 1024, False),
        (FEWEST + 20, 1024, True),
        (1024, FEWEST, False),
        (1024, 5, True),
        (FEWEST, FEWEST, True),
        (FEWEST, FEWEST, False),
        (FEWEST + 10, 20, True),
    ],
)
def test_few_blocks_do_not_matter(
    large_blocks: int, small_blocks: int, prefix_caching: bool, right: dict[str, list[int]]
) -> None:
    engine = make_engine(
        tiny_pair(),
        block_size=BLOCK_SIZE,
        large_blocks=large_blocks,
        small_blocks=small_blocks,
        prefix_caching=prefix_caching,
    )
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert total(answers, "num_preemptions") == engine.stats().tiers["large"].num_preemptions
    if large_blocks < 1024:
        assert total(answers, "num_preemptions") > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    ("block_size", "max_tokens_per_step"), [(1, 6), (1, 2048), (2, 2048), (3, 6)]
)
def test_small_blocks_and_small_chunks_under_pressure(
    block_size: int, max_tokens_per_step: int, right: dict[str, list[int]]
) -> None:
    engine = make_engine(
        tiny_pair(),
        block_size=block_size,
        large_blocks=-(-155 // block_size),
        small_blocks=-(-180 // block_size),
        config=EngineConfig(max_tokens_per_step=max_tokens_per_step, min_prefill_tokens=1),
        draft=DraftConfig(max_branching=6, max_frontier=8, max_draft_nodes=60),
    )
    requests = mixed_requests()
    arrivals = {request.request_id: number // 3 for number, request in enumerate(requests)}
    answers = serve(engine, requests, arrivals=arrivals)
    assert texts(answers) == right
    if max_tokens_per_step > 6:
        assert total(answers, "num_preemptions") > 0
    assert_idle(engine)


def test_both_tiers_under_pressure(right: dict[str, list[int]]) -> None:
    """Drafts give way to small answers, small answers to older ones."""
    small = [
        make_request(
            f"small{number}", random_prompt(30 + 7 * number, seed=70 + number), tier="small",
            temperature=0.8 * (number % 2), seed=number, max_tokens=40,
        )
        for number in range(8)
    ]  # fmt: skip
    expected = right | plainly(tiny_pair(), small)
    engine = make_engine(
        tiny_pair(), block_size=BLOCK_SIZE, large_blocks=FEWEST + 4, small_blocks=36
    )
    requests = [request for pair in zip(small, mixed_requests(), strict=False) for request in pair]
    requests += mixed_requests()[len(small) :]
    arrivals = {request.request_id: number // 2 for number, request in enumerate(requests)}
    answers = serve(engine, requests, arrivals=arrivals)
    assert texts(answers) == expected
    stats = engine.stats().tiers
    assert stats["large"].num_preemptions > 0
    assert stats["small"].num_preemptions > 0
    assert_idle(engine)


def test_an_answer_that_fills_the_whole_cache_ends() -> None:
    """Prompt and answer take every slot of both pools, so trees have to shrink to the root."""
    prompt = random_prompt(40)
    request = make_request("r", prompt, max_tokens=24, temperature=0.8, seed=3)
    expected = plainly(tiny_pair(), [request])
    for block_size in (1, 4, 16):
        num_blocks = 64 // block_size
        engine = make_engine(
            tiny_pair(), block_size=block_size, large_blocks=num_blocks, small_blocks=num_blocks
        )
        for _ in range(2):  # the second time with the prompt in the cache
            answers = serve(engine, [request])
            assert texts(answers) == expected
            assert total(answers, "num_preemptions") == 0
            assert_idle(engine)


def test_the_latest_arrival_gives_way_first() -> None:
    requests = [
        make_request(str(number), random_prompt(30, seed=number), max_tokens=30, speculation=False)
        for number in range(4)
    ]
    # Two fit to the end, three at first.
    engine = make_engine(tiny_pair(), block_size=BLOCK_SIZE, large_blocks=36)
    ended: list[str] = []

    def watch(_: int, answers: dict[str, Answer]) -> None:
        ended.extend(n for n, a in answers.items() if a.finished and n not in ended)

    answers = serve(engine, requests, on_step=watch)
    preemptions = [answers[str(number)].stats.num_preemptions for number in range(4)]
    assert preemptions[:2] == [0, 0]
    assert preemptions[2] > 0
    assert [*ended, "3"] == ["0", "1", "2", "3"]  # first come, first served


def test_reported_once_and_counted_although_preempted() -> None:
    requests = mixed_requests()
    engine = make_engine(tiny_pair(), block_size=BLOCK_SIZE, large_blocks=FEWEST)
    answers = serve(engine, requests)
    assert total(answers, "num_preemptions") > 0
    for request in requests:
        answer = answers[request.request_id]
        assert len(answer.prefills) == 1
        assert answer.prefills[0].num_prompt_tokens == len(request.prompt_token_ids)
        assert answer.stats.num_output_tokens == request.sampling.max_tokens
    stats = engine.stats()
    assert stats.tiers["large"].num_output_tokens == sum(r.sampling.max_tokens for r in requests)
