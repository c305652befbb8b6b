"""Prefix hits, copies of shared blocks, and what is published when."""

import pytest

from outrider.engine.cache.block_pool import BlockPool, OutOfBlocksError, root_hash
from outrider.engine.cache.kv_view import KVView

BLOCK_SIZE = 4


def make_pool(num_blocks: int = 16) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE)


def make_view(pool: BlockPool, *, salt: str = "", prefix_caching: bool = True) -> KVView:
    return KVView(pool, root=root_hash(salt), prefix_caching=prefix_caching)


def computed(pool: BlockPool, tokens: list[int], **options: object) -> KVView:
    view = make_view(pool, **options)
    view.match_prefix(tokens)
    view.reserve(len(tokens))
    view.advance(len(tokens), tokens)
    return view


TOKENS = list(range(100, 120))


@pytest.mark.parametrize(
    ("num_computed", "num_asked", "num_cached"),
    [
        (3, 9, 0),  # no full block
        (4, 9, 4),
        (7, 9, 4),  # the half-full one is not shared
        (8, 9, 8),
        (8, 8, 7),  # exactly a multiple: one token is left to compute
        (12, 8, 7),
        (8, 7, 4),
        (8, 1, 0),
    ],
)
def test_a_prefix_hit_leaves_a_token_to_compute(
    num_computed: int, num_asked: int, num_cached: int
) -> None:
    pool = make_pool()
    owner = computed(pool, TOKENS[:num_computed])
    view = make_view(pool)
    assert view.match_prefix(TOKENS[:num_asked]) == num_cached
    assert view.num_computed_tokens == view.num_cached_tokens == num_cached
    shared = -(-num_cached // BLOCK_SIZE)
    assert view.block_table == owner.block_table[:shared]


def test_a_hit_stops_at_the_first_difference() -> None:
    pool = make_pool()
    computed(pool, TOKENS[:12])
    view = make_view(pool)
    other = [*TOKENS[:5], 7, *TOKENS[6:12]]
    assert view.match_prefix(other) == 4


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    """The hit ends inside a block (all but the last token) while the owner still uses it."""
    pool = make_pool()
    owner = computed(pool, TOKENS[:8])
    theirs = list(owner.block_table)
    view = make_view(pool)
    view.match_prefix(TOKENS[:8])
    assert view.num_blocks_needed(8) == 1
    copies = view.reserve(8)
    assert copies == [(theirs[1], view.block_table[1])]
    assert view.block_table[0] == theirs[0]
    assert view.block_table[1] not in theirs
    assert owner.block_table == theirs
    assert [pool.ref_count(block) for block in (*theirs, view.block_table[1])] == [2, 1, 1]
    assert view.reserve(8) == []  # once is enough


def test_a_published_block_is_copied_even_when_no_view_holds_it() -> None:
    pool = make_pool()
    owner = computed(pool, TOKENS[:8])
    table = list(owner.block_table)
    owner.release()
    view = make_view(pool)
    view.match_prefix(TOKENS[:8])
    assert view.reserve(8) == [(table[1], view.block_table[1])]
    again = make_view(pool)
    assert again.match_prefix(TOKENS[:8]) == 7
    assert again.block_table == table


def test_the_source_of_a_copy_is_not_evicted_for_its_own_copy() -> None:
    pool = make_pool(num_blocks=2)
    computed(pool, TOKENS[:8]).release()
    view = make_view(pool)
    view.match_prefix(TOKENS[:8])
    # Both blocks are held, so there is no room for the copy.
    with pytest.raises(OutOfBlocksError):
        view.reserve(8)
    assert pool.num_used == 2
    view.release()
    assert pool.num_used == 0


def test_reserve_is_all_or_nothing() -> None:
    pool = make_pool(num_blocks=3)
    computed(pool, TOKENS[:4])
    view = make_view(pool)
    view.match_prefix(TOKENS[:4])
    with pytest.raises(OutOfBlocksError):
        view.reserve(16)
    assert len(view.block_table) == 1
    assert pool.num_available == 2


def test_scratch_is_not_published_and_goes_back() -> None:
    pool = make_pool()
    view = computed(pool, TOKENS[:6])
    view.reserve(6 + 9)  # a tree of nine nodes
    assert len(view.block_table) == 4
    view.advance(8, TOKENS)  # two of them were accepted
    view.trim()
    assert len(view.block_table) == 2
    other = make_view(pool)
    assert other.match_prefix(TOKENS) == 8
    assert pool.num_used == 2


def test_a_block_published_twice_is_found_once() -> None:
    pool = make_pool()
    first, second = make_view(pool), make_view(pool)
    for view in (first, second):  # both computed it at the same time
        view.reserve(4)
    for view in (first, second):
        view.advance(4, TOKENS)
    assert pool.is_published(first.block_table[0])
    assert not pool.is_published(second.block_table[0])
    second.release()
    found = make_view(pool)
    assert found.match_prefix(TOKENS[:5]) == 4
    assert found.block_table == first.block_table


def test_a_rewound_view_copies_what_it_published_before_writing_over_it() -> None:
    pool = make_pool()
    view = computed(pool, TOKENS[:8])
    table = list(view.block_table)
    view.rewind(6)
    assert view.num_computed_tokens == 6
    copies = view.reserve(8)
    assert copies == [(table[1], view.block_table[1])]
    view.advance(8, [*TOKENS[:6], 1, 2])
    for ending in (TOKENS[6:8], [1, 2]):
        found = make_view(pool)
        assert found.match_prefix([*TOKENS[:6], *ending, 0]) == 8
        found.release()


def test_rewind_gives_blocks_back_and_never_goes_forward() -> None:
    pool = make_pool()
    view = computed(pool, TOKENS[:10])
    view.rewind(50)
    assert view.num_computed_tokens == 10
    view.rewind(4)
    assert (view.num_computed_tokens, len(view.block_table)) == (4, 1)
    view.rewind(-1)
    assert (view.num_computed_tokens, view.block_table) == (0, [])


def test_tenants_never_share() -> None:
    pool = make_pool()
    computed(pool, TOKENS[:8], salt="a")
    for salt in ("b", "", "a\0"):
        view = make_view(pool, salt=salt)
        assert view.match_prefix(TOKENS[:9]) == 0
    assert make_view(pool, salt="a").match_prefix(TOKENS[:9]) == 8


def test_without_prefix_caching_nothing_is_found_or_published() -> None:
    pool = make_pool()
    view = computed(pool, TOKENS[:8], prefix_caching=False)
    assert not any(pool.is_published(block) for block in view.block_table)
    assert computed(pool, TOKENS[:9], prefix_caching=False).num_cached_tokens == 0


def test_slots_follow_the_block_table() -> None:
    pool = make_pool()
    pool.allocate()
    view = make_view(pool)
    view.reserve(9)
    view.block_table[:] = [5, 2, 9]
    assert [view.slot(s) for s in (0, 3, 4, 8)] == [20, 23, 8, 36]
