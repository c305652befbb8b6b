"""News of the prefix cache: what is told adds up to what a request could go on from."""

import random

import pytest

from outrider.engine.cache.block_news import BlockChanges, BlockFeed, BlockNews
from outrider.engine.cache.block_pool import BlockHash, BlockPool, prefix_hashes, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.recurrent_lines import RecurrentPool, RecurrentSizes
from outrider.engine.cache.window_blocks import WindowBlocks

BLOCK = 4
ROOT = root_hash("model", "dtype", "tenant")


class Listener:
    """Adds the news up."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.texts: dict[BlockHash, tuple[BlockHash, list[int]]] = {}
        self.num_told = 0

    def __call__(self, changes: BlockChanges) -> None:
        self.num_told += 1
        for block in changes.kept:
            self.hashes.add(block.block_hash)
            self.texts[block.block_hash] = block.parent, list(block.token_ids)
        self.hashes.difference_update(changes.dropped)


def compute(pool: BlockPool, tokens: list[int]) -> KVView:
    view = KVView(pool, root=ROOT)
    view.match_prefix(tokens)
    while view.num_computed_tokens < len(tokens):
        end = min(view.num_computed_tokens + 3 * BLOCK, len(tokens))
        view.reserve(end)
        view.advance(end, tokens)
    return view


def longest(hashes: set[BlockHash], tokens: list[int]) -> int:
    """How many tokens the news promise."""
    chain = list(prefix_hashes(ROOT, tokens, BLOCK))
    kept = [number for number, each in enumerate(chain, start=1) if each in hashes]
    return min(max(kept, default=0) * BLOCK, len(tokens) - 1)


def test_nothing_is_collected_before_there_is_a_sink() -> None:
    pool = BlockPool(num_blocks=8, block_size=BLOCK)
    feed = BlockFeed([BlockNews(pool)])
    compute(pool, list(range(8)))
    feed.deliver()
    assert pool.listener is None

    listener = Listener()
    feed.add_sink(listener)
    feed.deliver()
    assert listener.num_told == 0
    assert feed.hashes() == list(prefix_hashes(ROOT, list(range(8)), BLOCK))


def test_a_kept_block_comes_with_its_text_and_the_block_before_it() -> None:
    pool = BlockPool(num_blocks=8, block_size=BLOCK)
    feed, listener = BlockFeed([BlockNews(pool)]), Listener()
    feed.add_sink(listener)
    compute(pool, list(range(10)))
    feed.deliver()
    first, second = prefix_hashes(ROOT, list(range(10)), BLOCK)
    assert listener.texts == {first: (ROOT, [0, 1, 2, 3]), second: (first, [4, 5, 6, 7])}


def _plain() -> tuple[BlockPool, BlockNews]:
    pool = BlockPool(num_blocks=40, block_size=BLOCK)
    return pool, BlockNews(pool)


def _windowed() -> tuple[BlockPool, BlockNews]:
    window = WindowBlocks(num_blocks=40, window=2 * BLOCK, block_size=BLOCK)
    pool = BlockPool(num_blocks=60, block_size=BLOCK, window=window)
    return pool, BlockNews(pool)


@pytest.mark.parametrize("make", [_plain, _windowed])
def test_the_news_add_up_to_what_is_there(make: object) -> None:
    assert callable(make)
    pool, news = make()
    feed, listener, rng = BlockFeed([news]), Listener(), random.Random(3)
    feed.add_sink(listener)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(5, 60))] for _ in range(40)]
    promised = found = 0
    for number in range(300):
        tokens = rng.choice(texts)
        feed.deliver()
        promise = longest(listener.hashes, tokens)
        view = KVView(pool, root=ROOT)
        hit = view.match_prefix(tokens)
        assert hit <= promise, "no hit comes unannounced"
        promised, found = promised + promise, found + hit
        view.release()
        compute(pool, tokens).release()
        if number % 7 == 0:
            feed.deliver()
            assert listener.hashes == set(feed.hashes())
    assert found > 0.9 * promised


def test_recurrent_layers_keep_what_has_a_checkpoint_and_its_blocks() -> None:
    pool = BlockPool(num_blocks=40, block_size=16)
    recurrent = RecurrentPool(RecurrentSizes(num_lines=2, num_checkpoints=2), block_size=16)
    feed, listener = BlockFeed([BlockNews(pool, recurrent.states)]), Listener()
    feed.add_sink(listener)
    tokens = list(range(130))

    def run(tokens: list[int]) -> None:
        view = KVView(pool, root=ROOT, recurrent=recurrent)
        view.match_prefix(tokens)
        assert view.line is not None
        view.reserve(len(tokens))
        while view.line.num_tokens + 64 <= len(tokens):
            before, _, is_released = view.line.fold()
            if is_released:
                recurrent.states.release([before])
        view.advance(len(tokens), tokens)
        view.release()
        feed.deliver()

    run(tokens)
    chain = list(prefix_hashes(ROOT, tokens, 16))
    assert listener.hashes == {chain[7]} == set(feed.hashes()), "one checkpoint, at 128 tokens"
    for number in range(1, 6):  # others' states and blocks take its place
        run([number * 1000 + token for token in range(130)])
        assert listener.hashes == set(feed.hashes())
    assert chain[7] not in listener.hashes
