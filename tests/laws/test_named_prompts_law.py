"""An answer behind a named prompt is the one that is computed cold, bit for bit.

The bundled pair in bfloat16, greedy and sampled, with guesses and without, and after a restart.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest, Pin
from tests.engines import make_engine, make_request, serve
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    AS_USUAL,
    COLD,
    UNDRAFTED,
    Way,
    assert_same_answers,
    by,
)
from tests.laws.test_moved_blocks_law import PAIR, conversations, exactly
from tests.stores import opened_store, settle, slow_down

# More than the pair's longest request needs.
ROOM = {"large_blocks": 400, "small_blocks": 400}


def keep_beginnings(requests: list[EngineRequest], engine: Engine) -> None:
    """Have all but the last tokens of each request's prompt kept, in both models."""
    for tier in engine.info().tiers:
        for request in requests:
            prompt = request.prompt_token_ids[:-10]
            name = f"{tier}-{request.request_id}"
            pinned = make_request(name, prompt, tier=tier, max_tokens=0, cache_salt="tenant")
            serve(engine, [replace(pinned, pin=Pin(name=name, ttl_s=60.0))])
    assert len(engine.pins.infos()) == 2 * len(requests)


def let_go(engine: Engine) -> None:
    """Keep nothing any more, so that the engine is idle."""
    for info in engine.pins.infos():
        engine.pins.release(info.tenant, info.name)


def keep_until_asked(requests: list[EngineRequest], engine: Engine) -> None:
    keep_beginnings(requests, engine)
    let_go(engine)  # what was kept is there still: nothing else has come


@pytest.mark.slow_cases
@pytest.mark.parametrize("guesses", [True, False])
def test_a_named_prompt_gives_the_same_tokens_and_logprobs(guesses: bool) -> None:
    requests = conversations(3)
    served = assert_same_answers(
        requests,
        of=PAIR(),
        vary=by(**ROOM)
        | Way(
            watch=partial(keep_until_asked, requests),
            guesses=guesses,
            shows=("num_cached_tokens",),
        )
        | (ACCEPTING if guesses else AS_USUAL),
        like=COLD | ALONE | UNDRAFTED,
        within=exactly,
    )
    least = sum((len(each.prompt_token_ids) - 10) // 16 * 16 for each in requests)
    assert served.total("num_cached_tokens") >= least


@pytest.mark.slow_cases
@pytest.mark.parametrize("guesses", [True, False])
def test_a_named_prompt_gives_the_same_after_a_restart(guesses: bool, tmp_path: Path) -> None:
    requests = conversations(3)
    with opened_store(tmp_path) as store:
        engine = make_engine(PAIR(), store=store, **ROOM)
        keep_beginnings(requests, engine)
        settle(engine, store)

    def restore(engine: Engine) -> None:
        slow_down(engine)
        engine.pins.restore(engine.submit)
        while engine.has_work:
            engine.step()
        assert len(engine.pins.infos()) == 2 * len(requests)
        let_go(engine)

    with opened_store(tmp_path) as store:
        served = assert_same_answers(
            requests,
            of=PAIR(),
            vary=by(store=store, **ROOM)
            | Way(watch=restore, guesses=guesses, shows=("num_cached_tokens",))
            | (ACCEPTING if guesses else AS_USUAL),
            like=COLD | ALONE | UNDRAFTED,
            within=exactly,
        )
        assert served.engine.stats().store.num_restored_tokens > 0
