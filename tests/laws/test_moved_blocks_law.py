"""An answer that begins from blocks that were away is the one that is computed cold, bit for bit.

The bundled pair in bfloat16, whose compiled arithmetic keeps every row's bits, so that logarithms
can be compared by equality: greedy and sampled, with and without guesses.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.cache.block_pool import prefix_hashes
from outrider.engine.cache.extents import pack_extent, unpack_extent
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from tests.engines import (
    Answer,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)
from tests.heads import head_runner, make_head_engine
from tests.laws.head_cases import head_case
from tests.laws.mixed import long_requests, mixed_requests
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    AS_USUAL,
    COLD,
    UNDRAFTED,
    Way,
    assert_same_answers,
    by,
    exactly,
    few_blocks,
    with_head,
)
from tests.stores import opened_store, settle, slow_down

MakeEngine = Callable[..., Engine]
PAIR = partial(shipped_pair, "bfloat16")


def long_prompts(count: int, *, of: int = 6) -> list[tuple[int, ...]]:
    """Prompts of some hundred tokens, of questions that the pair was not trained on."""
    prompts = heldout_prompts(count * of)
    return [sum(prompts[n * of : (n + 1) * of], ()) for n in range(count)]


def conversations(count: int = 4) -> list[EngineRequest]:
    """Greedy and sampled, with log-probabilities."""
    return [
        make_request(
            f"{number}",
            prompt,
            max_tokens=24,
            temperature=0.9 * (number % 2),
            seed=number,
            num_logprobs=3,
            cache_salt="tenant",
        )
        for number, prompt in enumerate(long_prompts(count))
    ]


def move_blocks(
    requests: list[EngineRequest], make: Callable[..., Engine], target: Engine, **options: object
) -> None:
    """Serve requests in an engine, and take what its caches have into another one's."""
    source = make(PAIR(), **options)
    serve(source, requests)
    for tier, runner in source._runners.items():
        extents = []
        for request in requests:
            root = runner.new_view(request.cache_salt).root
            hashes = list(prefix_hashes(root, request.prompt_token_ids, runner.block_size))
            extents += runner.extents.export_blocks(hashes, parent=root)
        packed = [pack_extent(extent) for extent in extents]
        other = target._runners[tier]
        assert other.extents.import_blocks([unpack_extent(each) for each in packed])


@pytest.mark.slow_cases
@pytest.mark.parametrize("guesses", [True, False])
def test_imported_blocks_give_the_same_tokens_and_logprobs(guesses: bool) -> None:
    requests = conversations()
    way = Way(watch=partial(move_blocks, requests, make_engine), guesses=guesses)
    served = assert_same_answers(
        requests,
        of=PAIR(),
        vary=way | Way(shows=("num_cached_tokens",)) | (ACCEPTING if guesses else AS_USUAL),
        like=COLD | ALONE | UNDRAFTED,
        within=exactly,
    )
    least = sum(len(each.prompt_token_ids) // 16 * 16 - 16 for each in requests)
    assert served.total("num_cached_tokens") >= least


def serve_and_store(
    requests: list[EngineRequest], folder: Path, make: MakeEngine
) -> dict[str, Answer]:
    """Serve requests in an engine that is no more afterwards; what it knew is in the folder.

    Returns what it says when it is asked again.
    """
    with opened_store(folder) as store:
        engine = make(store=store)
        serve(engine, requests)
        settle(engine, store)
        assert engine.stats().store.num_written_bytes > 0
        return serve(engine, requests)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["windowed", "recurrent", "few blocks", "fp8"])
def test_every_layout_comes_back_from_the_disk(layout: str, tmp_path: Path) -> None:
    """Where both know the same numbers, whoever computed them."""
    options: dict[str, Any] = {
        "windowed": {"window_blocks": 66, "block_size": 4},
        "recurrent": {},
        "few blocks": {"large_blocks": 40, "small_blocks": 40},
        "fp8": {"kv_dtype": torch.float8_e4m3fn},
    }[layout]
    architecture = {"windowed": "gemma2", "recurrent": "qwen3_5"}.get(layout, "llama3")
    pair = tiny_pair(architecture, max_positions=256, drift=0.03)
    requests = long_requests((31, 60, 97, 140, 180))
    make = partial(make_engine, pair, **options)
    right = serve_and_store(requests, tmp_path, make)
    with opened_store(tmp_path) as store:
        vary = by(store=store, **options) | Way(watch=slow_down, shows=("num_cached_tokens",))
        served = assert_same_answers(requests, of=pair, vary=vary, right=right)
        assert served.engine.stats().store.num_restored_tokens > 0


@pytest.mark.slow
def test_a_heads_blocks_come_back_with_the_large_models(tmp_path: Path) -> None:
    case = head_case("random-eagle3")
    requests = [
        make_request(f"{number}", random_prompt(180, seed=number), temperature=0.8 * number)
        for number in range(2)
    ]
    serve_and_store(requests, tmp_path, partial(make_head_engine, case.pair, case.head))
    with opened_store(tmp_path) as store:
        vary = with_head(head=case.head, store=store) | Way(
            watch=slow_down, shows=("num_cached_tokens",)
        )
        served = assert_same_answers(requests, of=case.pair, vary=vary)
    runner = head_runner(served.engine)
    for request in requests:
        first, *rest = request.prompt_token_ids
        view = runner.new_view(f":{first}:")  # the salt of a head's text
        assert view.match_prefix(rest) == len(rest) // 16 * 16


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_blocks_that_come_and_go_under_pressure_change_nothing(
    on_device: bool, tmp_path: Path
) -> None:
    """Prompts are cut, some are pre-empted, and what is evicted comes back, turn after turn."""
    requests = mixed_requests()
    with opened_store(tmp_path, budget_bytes=2**21) as store:
        pressed = few_blocks(requests, spare=4, small_blocks=60, store=store, on_device=on_device)
        vary = pressed | ACCEPTING | Way(watch=slow_down, turns=3)
        served = assert_same_answers(requests, vary=vary)
        assert served.engine.stats().store.num_restored_tokens > 0
        assert store.folder.num_bytes <= 2**21
