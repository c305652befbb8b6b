"""The pool and its views against a model of what they promise, and the KV cases that need no model.

Contents are tracked beside the pool: `content[block]` holds what a cache would hold in each slot.
A slot that a view calls computed must hold that view's token, whatever happened in between.
"""

from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.cache.block_pool import BlockPool, OutOfBlocksError, chain_hash, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.retained_blocks import Retention

NUM_BLOCKS = 7
BLOCK_SIZE = 2


class _Writer:
    """A view, the tokens it has computed, and its tenant."""

    def __init__(self, pool: BlockPool, salt: str) -> None:
        self.salt = salt
        self.view = KVView(pool, root=root_hash(salt))
        self.tokens: list[int] = []


class PoolMachine(RuleBasedStateMachine):
    """Random views over one small pool: prefix hits, tree scratch, rewinds, eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.writers: list[_Writer] = []
        # what each slot holds: the salt and all tokens up to this one, as attention mixes them in
        self.content: list[tuple[str, tuple[int, ...]] | None] = [None] * NUM_BLOCKS * BLOCK_SIZE

    def _write(self, writer: _Writer, slot: int, prefix: list[int]) -> None:
        physical = writer.view.slot(slot)
        block = physical // BLOCK_SIZE
        assert self.pool.ref_count(block) == 1, "another view sees what is written"
        assert not self.pool.is_published(block), "a findable block is written to"
        self.content[physical] = (writer.salt, tuple(prefix))

    def _reserve(self, writer: _Writer, num_slots: int) -> bool:
        before = (list(writer.view.block_table), self.pool.num_available)
        try:
            copies = writer.view.reserve(num_slots)
        except OutOfBlocksError:
            assert before == (writer.view.block_table, self.pool.num_available), "half reserved"
            return False
        for source, copy in copies:
            for offset in range(BLOCK_SIZE):
                self.content[copy * BLOCK_SIZE + offset] = self.content[
                    source * BLOCK_SIZE + offset
                ]
        assert len(writer.view.block_table) * BLOCK_SIZE >= num_slots
        return True

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, salt: str, tokens: list[int]) -> None:
        """A sequence arrives and takes what the prefix cache has."""
        writer = _Writer(self.pool, salt)
        num_cached = writer.view.match_prefix(tokens)
        assert num_cached == writer.view.num_computed_tokens < len(tokens)
        writer.tokens = tokens[:num_cached]
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def compute(self, data: st.DataObject, tokens: list[int]) -> None:
        """A chunk or an accepted path is computed, with rejected nodes behind it."""
        writer = data.draw(st.sampled_from(self.writers))
        num_scratch = data.draw(st.integers(0, 3))
        start = len(writer.tokens)
        if not self._reserve(writer, start + len(tokens) + num_scratch):
            return
        for offset in range(len(tokens) + num_scratch):
            guess = [*writer.tokens, *tokens, *[9] * num_scratch][: start + offset + 1]
            self._write(writer, start + offset, guess)
        writer.tokens = writer.tokens + tokens
        writer.view.advance(len(writer.tokens), writer.tokens)
        writer.view.trim()

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """A view goes back to an earlier point, to be written over."""
        writer = data.draw(st.sampled_from(self.writers))
        num_tokens = data.draw(st.integers(0, len(writer.tokens)))
        writer.view.rewind(num_tokens)
        del writer.tokens[num_tokens:]

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A sequence finishes, is aborted or pre-empted."""
        writer = data.draw(st.sampled_from(self.writers))
        self.writers.remove(writer)
        seconds = data.draw(st.sampled_from((None, 0.0, 60.0, 1e-9)))
        writer.view.release(None if seconds is None else Retention(writer.salt, seconds))
        writer.view.release()  # twice does no harm

    @invariant()
    def reference_counts_are_the_holders(self) -> None:
        held = [0] * NUM_BLOCKS
        for writer in self.writers:
            table = writer.view.block_table
            assert len(set(table)) == len(table)
            for block in table:
                held[block] += 1
        assert held == [self.pool.ref_count(block) for block in range(NUM_BLOCKS)]
        assert self.pool.num_used == sum(count > 0 for count in held)
        assert self.pool.num_used + self.pool.num_available == NUM_BLOCKS

    @invariant()
    def computed_slots_hold_their_own_tokens(self) -> None:
        for writer in self.writers:
            assert writer.view.num_computed_tokens == len(writer.tokens)
            for slot in range(len(writer.tokens)):
                expected = (writer.salt, tuple(writer.tokens[: slot + 1]))
                assert self.content[writer.view.slot(slot)] == expected

    @invariant()
    def found_blocks_hold_what_their_hash_says(self) -> None:
        for block in range(NUM_BLOCKS):
            if not self.pool.is_published(block):
                continue
            salt, prefix = self.content[block * BLOCK_SIZE + BLOCK_SIZE - 1] or ("", ())
            block_hash = root_hash(salt)
            for start in range(0, len(prefix), BLOCK_SIZE):
                block_hash = chain_hash(block_hash, prefix[start : start + BLOCK_SIZE])
            assert self.pool.find(block_hash) == block

    @invariant()
    def everything_available_can_be_had(self) -> None:
        # on a copy, for allocating forgets what was cached
        pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        pool._retained = deepcopy(self.pool._retained)
        for name in ("_free", "_evictable", "_ref_counts", "_hashes", "_block_of_hash"):
            setattr(pool, name, getattr(self.pool, name).copy())
        taken = [pool.allocate() for _ in range(pool.num_available)]
        assert len(set(taken)) == len(taken)
        assert all(self.pool.ref_count(block) == 0 for block in taken)
        with pytest.raises(OutOfBlocksError):
            pool.allocate()

    def teardown(self) -> None:
        for writer in self.writers:
            writer.view.release()
        assert self.pool.num_used == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def published(pool: BlockPool, tokens: list[int], salt: str = "") -> KVView:
    view = KVView(pool, root=root_hash(salt))
    view.match_prefix(tokens)
    view.reserve(len(tokens))
    view.advance(len(tokens), tokens)
    return view


def test_a_lone_sequence_gets_ascending_blocks() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_eviction_takes_the_least_recently_used_and_a_prefix_from_its_tail() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    first = published(pool, [1, 1, 2, 2])
    second = published(pool, [3, 3, 4, 4])
    tables = list(first.block_table), list(second.block_table)
    second.release()
    first.release()
    pool.allocate(), pool.allocate()  # the two that are really free
    assert [pool.allocate() for _ in range(4)] == [*reversed(tables[1]), *reversed(tables[0])]


def test_using_a_cached_block_makes_it_recent() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    old, new = published(pool, [1, 1]), published(pool, [2, 2])
    old_block, new_block = old.block_table[0], new.block_table[0]
    old.release()
    new.release()
    hit = KVView(pool, root=root_hash(""))
    assert hit.match_prefix([1, 1, 5]) == 2
    hit.release()
    pool.allocate(), pool.allocate()
    assert [pool.allocate(), pool.allocate()] == [new_block, old_block]


def test_unpublished_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    cached = published(pool, [1, 1])
    cached_block = cached.block_table[0]
    cached.release()
    assert cached_block not in (pool.allocate(), pool.allocate())
    assert pool.allocate() == cached_block
    assert pool.find(chain_hash(root_hash(""), [1, 1])) is None  # evicted, so forgotten


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    published(pool, [1, 1])
    pool.allocate()
    with pytest.raises(OutOfBlocksError):
        pool.allocate()


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_hashes_cover_the_whole_prefix_the_salt_and_the_order() -> None:
    def chain(salt: str, *blocks: list[int]) -> bytes:
        block_hash = root_hash("float32", salt)
        for tokens in blocks:
            block_hash = chain_hash(block_hash, tokens)
        return block_hash

    chains = {
        chain("a", [1, 2], [3, 4]),
        chain("b", [1, 2], [3, 4]),
        chain("", [1, 2], [3, 4]),
        chain("a", [3, 4], [1, 2]),
        chain("a", [3, 4]),
        chain("a", [1, 2], [3, 5]),
        chain("a", [2, 1], [3, 4]),
        chain("a", [1, 258], [3, 4]),
    }
    assert len(chains) == 8
    assert root_hash("float32", "a") != root_hash("bfloat16", "a")
