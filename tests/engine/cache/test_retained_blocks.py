"""Blocks whose texts will come back outlast others, and never beyond a tenant's fair share."""

from outrider.engine.cache.block_pool import BlockPool, prefix_hashes, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.retained_blocks import Retention

NUM_BLOCKS, SIZE = 16, 4


class World:
    """A pool; `now_s` is its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=SIZE, clock=lambda: self.now_s)

    def compute(
        self, text: int, tenant: str = "a", *, seconds: float = 0.0, blocks: int = 4
    ) -> None:
        """A text of some blocks is computed, and its sequence ends."""
        tokens = [text] * (blocks * SIZE)
        view = KVView(self.pool, root=root_hash(tenant))
        view.match_prefix([*tokens, 0])
        view.reserve(len(tokens))
        view.advance(len(tokens), tokens)
        view.release(Retention(tenant, seconds))

    def num_kept(self, text: int, tenant: str = "a", *, blocks: int = 4) -> int:
        """Blocks of a text that are there, from its beginning on."""
        found = prefix_hashes(root_hash(tenant), [text] * (blocks * SIZE), SIZE)
        return sum(self.pool.find(each) is not None for each in found)


def test_a_text_that_will_come_back_outlasts_others() -> None:
    world = World()
    world.compute(1, seconds=60.0)
    for text in range(2, 12):
        world.compute(text)
    assert world.num_kept(1) == 4
    assert world.num_kept(2) == 0


def test_its_time_ends() -> None:
    world = World()
    world.compute(1, seconds=60.0)
    world.now_s = 61.0
    for text in range(2, 6):
        world.compute(text)
    assert world.num_kept(1) == 0


def test_what_is_used_again_counts_anew() -> None:
    world = World()
    world.compute(1, seconds=60.0)
    world.now_s = 50.0
    world.compute(1, seconds=60.0)
    world.now_s = 100.0
    for text in range(2, 12):
        world.compute(text)
    assert world.num_kept(1) == 4


def test_a_tenant_that_wants_all_kept_has_half_of_it_where_it_is_alone() -> None:
    world = World()
    for text in range(1, 5):
        world.compute(text, seconds=1e4)
    world.compute(9)
    kept = sum(world.num_kept(text) for text in range(1, 5))
    assert world.num_kept(9) == 4
    assert kept == 12  # 8 of them are retained, 4 go next
    world.compute(10)
    assert sum(world.num_kept(text) for text in range(1, 5)) == 8


def test_no_tenant_keeps_more_than_its_share_of_the_cache() -> None:
    world = World()
    for text in range(1, 4):
        world.compute(text, "hostile", seconds=1e4)
    for turn in range(3):
        for number in range(3):  # three others, who ask for nothing: a quarter each
            world.compute(turn, f"other-{number}")
    kept = sum(world.num_kept(text, "hostile") for text in range(1, 4))
    assert kept <= NUM_BLOCKS // 4
    assert sum(world.num_kept(2, f"other-{number}") for number in range(3)) == 12


def test_what_is_retained_is_evicted_before_a_sequence_waits() -> None:
    world = World()
    for text in range(1, 5):
        world.compute(text, f"{text}", seconds=1e4)
    assert world.pool.num_available == NUM_BLOCKS
    world.compute(9, "new", blocks=NUM_BLOCKS)
    assert world.num_kept(9, "new", blocks=NUM_BLOCKS) == NUM_BLOCKS
