"""Placement by caches: conversations follow their blocks, bounds hold, lies do not last."""

import random
from collections.abc import Sequence

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT, prefix_hashes, prefix_root
from outrider.engine.cache.sealing import code_of
from outrider.engine.events import TierInfo
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset, join_hashes
from outrider.gateway.engines.fleet.block_index import BlockIndex, block_keys
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.replica_placement import Loads, ReplicaLoad
from outrider.gateway.engines.fleet.stored_index import StoredIndex
from outrider.verifier.params import SamplingParams

BLOCK = 16
LARGE = TierInfo(
    tier="large",
    model_id="m",
    path="m",
    max_context=10**6,
    vocab_size=100,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    numerics="n",
    kv_dtype="torch.float32",
    block_size=BLOCK,
)


class Fleet:
    """Replicas that say what they have; the clock stands unless a test moves it."""

    def __init__(self, num_replicas: int, info: TierInfo = LARGE) -> None:
        self.now_s = 0.0
        self.index = BlockIndex(max_blocks=100_000, max_lanes=num_replicas)
        stored = StoredIndex(max_blocks=100_000, max_lanes=num_replicas)
        self.placement = CacheAware(
            self.index, stored, tiers={"large": info}, seed=1, clock=lambda: self.now_s
        )
        self.lanes = [self.index.add_lane() for _ in range(num_replicas)]

    def keeps(self, lane: int, tokens: Sequence[int], *, salt: str = "", every: int = 1) -> None:
        root = prefix_root("n", "torch.float32", salt)
        hashes = list(prefix_hashes(root, tokens, BLOCK))[every - 1 :: every]
        self.index.note(lane, BlocksReset(1, join_hashes(hashes)))

    def stores(
        self, lane: int, tokens: Sequence[int], *, key: bytes = b"k", every: int = 1
    ) -> None:
        """A replica that was started anew has a text on its disk, and nothing in its cache."""
        root = prefix_root("n", "torch.float32", "")
        hashes = list(prefix_hashes(root, tokens, BLOCK))[every - 1 :: every]
        codes = "".join(code_of(key, each) for each in hashes).encode()
        assert self.placement.note_news(lane, BlocksReset(1, b"", codes, key))

    def choose(self, request: EngineRequest, **loads: ReplicaLoad) -> int:
        candidates = Loads.of(
            loads.get(f"r{lane}", ReplicaLoad(replica_id=str(lane), index_lane=lane))
            for lane in self.lanes
        )
        return self.placement.choose(request, candidates)


def ask(
    tokens: Sequence[int], name: str = "a", *, salt: str = "", adapters: tuple[AdapterRef, ...] = ()
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        tier="large",
        sampling=SamplingParams(max_tokens=8),
        cache_salt=salt,
        adapters=adapters,
    )


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


@pytest.mark.parametrize("num_replicas", [4, 200])
def test_a_conversation_goes_to_where_its_blocks_are(num_replicas: int) -> None:
    fleet, turn = Fleet(num_replicas), text(0, 700)
    fleet.keeps(3, turn)
    assert fleet.choose(ask(turn + text(1, 50))) == 3
    assert fleet.placement.expected_hit("a") == 688
    assert fleet.placement.expected_hit("other") == 0


def test_another_tenants_blocks_and_those_of_an_adapter_are_not_counted() -> None:
    fleet, turn = Fleet(2), text(0, 700)
    fleet.keeps(1, turn, salt="one")
    fleet.choose(ask(turn, salt="one"))
    assert fleet.placement.expected_hit("a") == 699 // BLOCK * BLOCK
    for number, request in enumerate(
        (
            ask(turn, "b", salt="two"),
            ask(turn, "c", salt="one", adapters=(AdapterRef(name="x", tier="large", folder="f"),)),
        )
    ):
        fleet.choose(request)
        assert fleet.placement.expected_hit(request.request_id) == 0, number


def test_a_prefix_is_worth_the_seconds_that_it_saves() -> None:
    fleet, turn = Fleet(2), text(0, 16_000)
    fleet.keeps(0, turn)
    busy = ReplicaLoad(replica_id="0", index_lane=0, num_queued_prompt_tokens=15_000)
    busier = ReplicaLoad(replica_id="0", index_lane=0, num_queued_prompt_tokens=17_000)
    assert fleet.choose(ask(turn), r0=busy) == 0
    assert fleet.choose(ask(turn, "b"), r0=busier) == 1


def test_requests_of_one_beginning_that_come_at_once_go_together_up_to_a_bound() -> None:
    fleet, shared = Fleet(4), text(0, 1600)
    chosen = [fleet.choose(ask(shared + text(n, 40), str(n))) for n in range(1, 6)]
    assert len(set(chosen)) == 1, "nothing is published yet"
    chosen += [fleet.choose(ask(shared + text(n, 40), str(n))) for n in range(6, 60)]
    assert max(chosen.count(lane) for lane in range(4)) <= 40
    assert len(set(chosen)) > 1, "the hot prefix spreads"


def test_what_is_on_its_way_is_forgotten_when_it_arrives_ends_or_is_late() -> None:
    fleet, shared = Fleet(2), text(0, 1600)
    for name, forget in (
        ("prefilled", lambda: fleet.placement.note_prefill("prefilled", 0)),
        ("ended", lambda: fleet.placement.note_end("ended")),
        ("late", lambda: setattr(fleet, "now_s", 1000.0)),
    ):
        fleet.choose(ask(shared, name))
        fleet.choose(ask(shared, "next"))
        assert fleet.placement.expected_hit("next") == 1599
        fleet.placement.note_end("next")
        forget()
        fleet.choose(ask(shared, "next"))
        assert fleet.placement.expected_hit("next") == 0
        fleet.placement.note_end("next")


def test_a_replica_that_lies_loses_its_credit_and_earns_it_back() -> None:
    fleet, turn = Fleet(2), text(0, 1600)
    fleet.keeps(0, turn)
    busy = ReplicaLoad(replica_id="0", index_lane=0, num_queued_prompt_tokens=100)
    chosen = []
    for number in range(20):
        chosen.append(fleet.choose(ask(turn, str(number)), r0=busy))
        fleet.placement.note_prefill(str(number), 0)
    assert chosen.count(0) < 12
    assert chosen[-1] == 1
    full = ReplicaLoad(replica_id="1", index_lane=1, num_queued_prompt_tokens=9000)
    for number in range(20):  # it gets requests where the other one has too much to do
        fleet.choose(ask(turn, str(number)), r1=full)
        fleet.placement.note_prefill(str(number), 1599)
    assert fleet.choose(ask(turn), r0=busy) == 0


def test_a_checkpoint_is_found_among_blocks_that_are_none() -> None:
    info = TierInfo(
        **{name: getattr(LARGE, name) for name in LARGE.__slots__} | {"checkpoint_tokens": 64}
    )
    fleet, turn = Fleet(3, info), text(0, 6400)
    fleet.keeps(2, turn[:4800], every=300)  # one hash
    assert fleet.choose(ask(turn)) == 2
    assert fleet.placement.expected_hit("a") == 4800


def test_the_text_is_hashed_as_the_engine_hashes_it() -> None:
    from outrider.engine.cache.block_pool import BlockPool
    from outrider.engine.cache.kv_view import KVView

    fleet, tokens = Fleet(1), text(5, 100)
    pool = BlockPool(num_blocks=20, block_size=BLOCK)
    view = KVView(pool, root=prefix_root("n", "torch.float32", "salt"))
    view.reserve(100)
    view.advance(100, tokens)
    published = {int.from_bytes(each[:8], "little") for each, _ in pool.published()}
    assert set(block_keys(fleet.placement.hashes(ask(tokens, salt="salt"))).tolist()) == published


# ---- what lies on disks ------------------------------------------------------------------------


def disk(lane: int, token_s: float = 1e-5, **load: float) -> ReplicaLoad:
    """A replica that computes a token in 1 ms and reads one in a hundredth of that."""
    figures = {"seconds_per_prompt_token": 1e-3, "seconds_per_stored_token": token_s}
    return ReplicaLoad(replica_id=str(lane), index_lane=lane, **{**figures, **load})  # type: ignore[arg-type]


def test_a_conversation_goes_to_the_disk_that_has_it() -> None:
    fleet, turn = Fleet(3), text(0, 1600)
    fleet.stores(1, turn)
    loads = {f"r{lane}": disk(lane) for lane in range(3)}
    assert fleet.choose(ask(turn + text(1, 50)), **loads) == 1
    assert 1600 * 15 // 16 <= fleet.placement.expected_hit("a") <= 1600
    assert fleet.placement.source("a") is None
    fleet.choose(ask(text(2, 800), "b"), **loads)
    assert fleet.placement.expected_hit("b") == 0


def test_what_is_soonest_counts_a_cache_a_disk_or_another_replica() -> None:
    def placed(**changes: float) -> tuple[int, int]:
        fleet, turn = Fleet(3), text(0, 1600)
        fleet.stores(1, turn)
        fleet.keeps(0, turn)
        loads = {
            "r0": disk(0, num_queued_prompt_tokens=400),
            "r1": disk(1, changes.get("disk_s", 1e-5)),
            "r2": disk(2, seconds_per_moved_token=changes.get("moved_s", float("inf"))),
        }
        return fleet.choose(ask(turn), **loads), fleet.placement.expected_hit("a")

    assert placed() == (1, 1599)
    assert placed(disk_s=5e-4) == (0, 1599), "a slow disk takes longer than the queue at the cache"
    assert placed(moved_s=1e-6) == (2, 1599), "a fast line"


def test_a_disk_that_gives_nothing_loses_its_credit_and_the_cache_keeps_its_own() -> None:
    fleet, turn = Fleet(2), text(0, 1600)
    fleet.stores(0, turn)
    loads = {"r0": disk(0, num_queued_prompt_tokens=100), "r1": disk(1)}
    chosen = []
    for number in range(12):
        chosen.append(fleet.choose(ask(turn, f"{number}"), **loads))
        fleet.placement.note_prefill(f"{number}", 0)
    assert (chosen[0], chosen[-1]) == (0, 1)
    hashes = fleet.placement.hashes(ask(turn))
    fleet.placement.note_news(0, BlocksChanged(2, join_hashes(hashes), b""))
    assert fleet.choose(ask(turn), **loads) == 0
    assert fleet.placement.expected_hit("a") == 1599


def test_private_texts_and_what_has_gone_from_a_disk_are_not_looked_for() -> None:
    fleet, turn = Fleet(2), text(0, 1600)
    fleet.stores(1, turn)
    loads = {f"r{lane}": disk(lane) for lane in range(2)}
    fleet.choose(ask(turn, "private", salt=f"{PRIVATE_SALT}t"), **loads)
    assert fleet.placement.expected_hit("private") == 0
    codes = "".join(code_of(b"k", each) for each in fleet.placement.hashes(ask(turn))).encode()
    assert fleet.placement.note_news(1, BlocksChanged(2, b"", b"", b"", codes))
    fleet.choose(ask(turn, "gone"), **loads)
    assert fleet.placement.expected_hit("gone") == 0
    fleet.placement.note_end("gone")
    fleet.stores(0, turn)
    assert fleet.choose(ask(turn, "there"), **loads) == 0
    fleet.placement.note_end("there")
    fleet.placement.clear_lane(0)
    fleet.choose(ask(turn, "lost"), **loads)
    assert fleet.placement.expected_hit("lost") == 0


def test_replicas_with_keys_of_their_own_are_all_known_and_checkpoints_are_found() -> None:
    info = TierInfo(
        **{name: getattr(LARGE, name) for name in LARGE.__slots__} | {"checkpoint_tokens": 64}
    )
    fleet, turn = Fleet(3, info), text(0, 6400)
    fleet.stores(1, turn[:640], key=b"own", every=4)
    fleet.stores(2, turn[:4800], every=300)  # one state
    loads = {f"r{lane}": disk(lane) for lane in range(3)}
    assert fleet.choose(ask(turn), **loads) == 2
    assert fleet.placement.expected_hit("a") == 4800
    fleet.placement.note_end("a")
    loads["r2"] = disk(2, num_queued_prompt_tokens=9000)
    assert fleet.choose(ask(turn), **loads) == 1
    assert fleet.placement.expected_hit("a") == 640
