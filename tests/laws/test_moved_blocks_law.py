"""An answer that begins from blocks that were away is the one that is computed cold, bit for bit.

The bundled pair in bfloat16, whose compiled arithmetic keeps every row's bits, so that logarithms
can be compared by equality: greedy and sampled, with and without guesses.
"""

from collections.abc import Callable
from functools import partial

import pytest

from outrider.engine.cache.block_pool import prefix_hashes
from outrider.engine.cache.extents import pack_extent, unpack_extent
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from tests.engines import Answer, heldout_prompts, make_engine, make_request, serve, shipped_pair
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    AS_USUAL,
    COLD,
    UNDRAFTED,
    Way,
    assert_same_answers,
)

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


def exactly(name: str, answer: Answer, right: Answer) -> None:
    """Equal tokens, and logarithms with equal bits."""
    assert answer.token_ids == right.token_ids, name
    assert answer.logprobs == right.logprobs, name
    assert answer.finish_reason == right.finish_reason, name


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
