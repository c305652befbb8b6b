"""News of a folder: a placement knows from codes what an engine will find there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.cache.sealing import Seal, code_of
from outrider.engine.cache.stored_news import StoredNews
from outrider.gateway.engines.backends.wire import BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.replica_placement import Loads, ReplicaLoad
from outrider.gateway.engines.fleet.stored_index import StoredIndex
from tests.engine.cache.test_extent_folder import ABOUT, chain, extent_of, folder_of
from tests.engines import make_engine, serve, tiny_pair
from tests.laws.mixed import long_requests
from tests.stores import KEY, opened_store, settle, slow_down


def codes_of(text: int, first: int, last: int) -> set[str]:
    key = Seal(KEY).names_key
    return {code_of(key, each) for each in chain(text, last)[first:last]}


def split(codes: bytes) -> set[str]:
    joined = codes.decode()
    return {joined[place : place + 8] for place in range(0, len(joined), 8)}


def test_what_comes_and_goes_is_told_once_others_files_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "kv")
    space = folder.space(ABOUT)
    folder.write(space, extent_of(chain(1), 0, 4))
    news = StoredNews([(space, "b")], names_key=folder.names_key, clock=lambda: 0.0)
    assert split(news.codes()) == codes_of(1, 0, 4)
    folder.write(space, extent_of(chain(1), 4, 8))
    assert [split(each) for each in news.take()] == [codes_of(1, 4, 8), set()]
    assert news.take() == (b"", b"")
    found = space.match(chain(1), 0)
    assert found is not None
    space.remove(found[0])
    assert [split(each) for each in news.take()] == [set(), codes_of(1, 0, 4)]
    other = folder_of(tmp_path / "kv")
    other.write(other.space(ABOUT), extent_of(chain(2), 0, 4))
    folder.collect()
    assert [split(each) for each in news.take()] == [codes_of(2, 0, 4), set()]


def test_a_busy_engine_looks_seldom(tmp_path: Path) -> None:
    folder, now_s = folder_of(tmp_path / "kv"), iter((10.0, 11.0, 12.0, 200.0, 201.0))
    space = folder.space(ABOUT)
    news = StoredNews([(space, "b")], names_key=folder.names_key, clock=lambda: next(now_s))
    news.codes()
    folder.write(space, extent_of(chain(1), 0, 4))
    assert news.take()[0], "it took a second"
    folder.write(space, extent_of(chain(1), 4, 8))
    assert news.take() == (b"", b"")
    assert split(news.take()[0]) == codes_of(1, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama3", "gemma2", "qwen3_5"])
def test_a_placement_expects_of_a_restarted_engine_what_that_reads(
    architecture: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"window_blocks": 66} if architecture == "gemma2" else {}
    pair = tiny_pair(architecture, max_positions=256, drift=0.03)
    requests = long_requests((97, 140, 180))
    with opened_store(tmp_path) as store:
        engine = make_engine(pair, store=store, **options)
        serve(engine, requests)
        settle(engine, store)
    with opened_store(tmp_path) as store:
        engine = make_engine(pair, store=store, **options)
        slow_down(engine)
        stored, index = StoredIndex(), BlockIndex()
        placement = CacheAware(index, stored, tiers=engine.info().tiers)
        news = engine.blocks.stored
        assert news is not None
        reset = BlocksReset(0, b"", news.codes(), news.names_key)
        assert placement.note_news(index.add_lane(), reset)
        load = ReplicaLoad(
            replica_id="0", seconds_per_prompt_token=1.0, seconds_per_stored_token=1e-6
        )
        for request in requests:
            asked = replace(request, request_id=f"{request.request_id} again")
            placement.choose(asked, Loads.of([load]))
            expected = placement.expected_hit(asked.request_id)
            answer = serve(engine, [asked])[asked.request_id]
            assert answer.stats.num_cached_tokens == expected > 0
            placement.note_prefill(asked.request_id, expected)
