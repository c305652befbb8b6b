"""The smaller cache of windowed layers: every key that a row may see is where the view says."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.cache.block_pool import BlockPool, OutOfBlocksError, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.window_blocks import (
    OutOfWindowBlocksError,
    WindowBlocks,
    window_block_demand,
)
from tests.sizes import repeats

BLOCK_SIZE = 4
WINDOW = 6
KEPT = 64  # tokens behind a window that a view goes on holding


def make_pool(num_blocks: int, num_window_blocks: int) -> BlockPool:
    window = WindowBlocks(num_blocks=num_window_blocks, window=WINDOW, block_size=BLOCK_SIZE)
    return BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, window=window)


def make_view(pool: BlockPool) -> KVView:
    return KVView(pool, root=root_hash("model"))


def computed(pool: BlockPool, tokens: list[int]) -> KVView:
    view = make_view(pool)
    start = view.match_prefix(tokens)
    for end in [*range(start + 8, len(tokens), 8), len(tokens)]:
        view.reserve(end)
        view.advance(end, tokens)
    return view


TOKENS = list(range(1000, 1200))


def test_a_long_answer_holds_only_its_windows_blocks() -> None:
    pool = make_pool(64, 64)
    view = computed(pool, TOKENS)
    assert len(view.block_table) == len(TOKENS) // BLOCK_SIZE
    held = [block for block in view.window_table if block]
    assert len(held) == len(set(held)) <= (WINDOW + KEPT) // BLOCK_SIZE + 2
    assert view.window_table[-1] == held[-1]
    view.release()
    assert pool.window is not None
    assert pool.window.num_available == 63


def test_a_prefix_whose_window_is_gone_is_cut_to_where_it_is_there() -> None:
    pool = make_pool(200, 24)
    computed(pool, TOKENS[:40]).release()
    hit = make_view(pool)
    assert hit.match_prefix(TOKENS[:41]) == 40
    hit.release()
    for number in range(4):  # 24 window blocks are needed for others
        computed(pool, [number, *TOKENS[:60]]).release()
    assert make_view(pool).match_prefix(TOKENS[:41]) == 0


def test_blocks_without_a_prefix_give_theirs_before_a_prefix_does() -> None:
    pool = make_pool(64, 24)
    computed(pool, TOKENS[:40]).release()
    for _ in range(4):
        view = KVView(pool, root=root_hash("model"), prefix_caching=False)
        view.reserve(40)
        view.release()
    assert make_view(pool).match_prefix(TOKENS[:41]) == 40


def test_a_view_that_goes_back_behind_its_window_starts_anew() -> None:
    pool = make_pool(64, 64)
    view = computed(pool, TOKENS)
    view.rewind(len(TOKENS) - 3)
    assert view.num_computed_tokens == len(TOKENS) - 3
    view.rewind(20)
    assert view.num_computed_tokens == 0
    assert not view.block_table
    assert not view.window_table


def test_room_is_asked_for_before_anything_is_taken() -> None:
    pool = make_pool(64, 8)
    view = make_view(pool)
    with pytest.raises(OutOfBlocksError):
        view.reserve(8 * BLOCK_SIZE)
    assert not view.block_table
    view.reserve(7 * BLOCK_SIZE)
    assert pool.num_available == 0
    with pytest.raises(OutOfWindowBlocksError):
        pool.window.hold(63)  # type: ignore[union-attr]


def test_the_demand_is_enough_for_answers_of_any_length() -> None:
    demand = window_block_demand(WINDOW, block_size=BLOCK_SIZE, max_sequences=3, max_step_tokens=24)
    pool = make_pool(3 * 64, demand)
    views = [make_view(pool) for _ in range(3)]
    for end in range(8, len(TOKENS), 8):
        for number, view in enumerate(views):
            tokens = [number, *TOKENS]
            view.reserve(end)
            view.advance(end, tokens)


class Caches(RuleBasedStateMachine):
    """Views that grow, share, go back and end over two caches whose slots hold tokens."""

    @initialize(num_window_blocks=st.integers(24, 80))
    def start(self, num_window_blocks: int) -> None:
        self.pool = make_pool(60, num_window_blocks)
        assert self.pool.window is not None
        self.window = self.pool.window
        self.full_cache: dict[int, int] = {}
        self.window_cache: dict[int, int] = {}
        self.window_block_of: dict[int, int] = {}
        self.views: list[tuple[KVView, list[int]]] = []

    def pass_over(self, view: KVView, tokens: list[int], end: int) -> None:
        """Reserve, settle as a runner does, write rows through the device's table, advance."""
        begin = view.num_computed_tokens
        pairs = view.reserve(end)
        self.window_block_of.update(self.window.take_changes())
        copied = {slot: self.full_cache.get(slot) for slot in list(self.full_cache)}
        for source, copy in pairs:
            for offset in range(BLOCK_SIZE):
                value = copied.get(source * BLOCK_SIZE + offset)
                if value is not None:
                    self.full_cache[copy * BLOCK_SIZE + offset] = value
        before = dict(self.window_cache)
        for source, copy in self.window.take_copies():
            for offset in range(BLOCK_SIZE):
                value = before.get(source * BLOCK_SIZE + offset)
                if value is not None:
                    self.window_cache[copy * BLOCK_SIZE + offset] = value
        for logical in range(begin, end):
            block, offset = view.block_table[logical // BLOCK_SIZE], logical % BLOCK_SIZE
            self.full_cache[block * BLOCK_SIZE + offset] = tokens[logical]
            own = self.window_block_of.get(block, 0)
            assert own == view.window_table[logical // BLOCK_SIZE] != 0
            self.window_cache[own * BLOCK_SIZE + offset] = tokens[logical]
        view.advance(end, tokens)

    @precondition(lambda self: len(self.views) < 3)
    @rule(kind=st.integers(0, 1), length=st.integers(2, 150), change=st.integers(0, 200))
    def begin(self, kind: int, length: int, change: int) -> None:
        tokens = [kind * 1000 + number for number in range(200)]
        tokens[change:] = [-token - 1 for token in tokens[change:]]
        view = make_view(self.pool)
        view.match_prefix(tokens[:length])
        self.views.append((view, tokens))

    @precondition(lambda self: bool(self.views))
    @rule(number=st.integers(0, 2), rows=st.integers(1, 24))
    def grow(self, number: int, rows: int) -> None:
        view, tokens = self.views[number % len(self.views)]
        end = min(view.num_computed_tokens + rows, len(tokens))
        if view.num_computed_tokens == end:
            return
        try:
            self.pass_over(view, tokens, end)
        except OutOfBlocksError:
            view.release()

    @precondition(lambda self: bool(self.views))
    @rule(number=st.integers(0, 2), back=st.integers(0, 90))
    def go_back(self, number: int, back: int) -> None:
        view, tokens = self.views[number % len(self.views)]
        kept = max(view.num_computed_tokens - back, 0)
        view.rewind(kept)
        for place in range(kept, len(tokens)):
            tokens[place] += 10_000

    @precondition(lambda self: bool(self.views))
    @rule(number=st.integers(0, 2))
    def end(self, number: int) -> None:
        self.views.pop(number % len(self.views))[0].release()

    @invariant()
    def every_visible_key_is_there(self) -> None:
        for view, tokens in getattr(self, "views", []):
            computed = view.num_computed_tokens
            for logical in range(computed):
                index, offset = divmod(logical, BLOCK_SIZE)
                assert (
                    self.full_cache[view.block_table[index] * BLOCK_SIZE + offset]
                    == (tokens[logical])
                )
                if logical > computed - WINDOW:
                    own = view.window_table[index]
                    assert own
                    assert self.window_cache[own * BLOCK_SIZE + offset] == tokens[logical]

    @invariant()
    def no_block_is_lost(self) -> None:
        if getattr(self, "views", None) == []:
            assert self.window.num_available == self.window.num_blocks - 1
            assert self.pool.num_used == 0


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=repeats(200, 25), stateful_step_count=40, deadline=None)
