"""Events of the prefix cache, read as a subscriber of vLLM's reads them."""

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from outrider.engine.cache.block_news import BlockFeed, BlockNews
from outrider.engine.cache.block_pool import PRIVATE_SALT, BlockPool, prefix_root
from outrider.engine.cache.kv_view import KVView
from outrider.engine.errors import EngineError
from outrider.engine.events import TierInfo
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, KeyPair
from outrider.gateway.engines.backends.kv_events import KvEventPublisher
from outrider.gateway.settings.tree import SettingsError, load_settings

TIER = TierInfo(
    tier="large",
    model_id="m",
    path="m",
    max_context=64,
    vocab_size=9,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    numerics="n",
    kv_dtype="torch.float32",
    block_size=4,
)
LOCAL = "tcp://127.0.0.1:*"


class Cache:
    """A pool whose news are published, and a subscriber."""

    def __init__(self, keys: FleetKeys | None = None) -> None:
        self.publisher = KvEventPublisher(
            TIER, endpoint=LOCAL, replay_endpoint=LOCAL, topic="kv@pod@m", keys=keys
        )
        self.pool = BlockPool(num_blocks=4, block_size=4)
        other = BlockPool(num_blocks=4, block_size=4)
        self.small = other
        self.feed = BlockFeed(
            [BlockNews(self.pool, model="large"), BlockNews(other, model="small")]
        )
        self.feed.add_sink(self.publisher.publish)
        self.context = zmq.Context()
        endpoint, self.replay_endpoint = self.publisher.endpoints
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.rcvtimeo = 20_000
        self.subscriber.subscribe("kv@pod")
        self.subscriber.connect(endpoint)

    def compute(self, tokens: list[int], *, salt: str = "", pool: BlockPool | None = None) -> None:
        root = prefix_root("n", "torch.float32", salt)
        view = KVView(self.pool if pool is None else pool, root=root)
        view.match_prefix(tokens)
        view.reserve(len(tokens))
        view.advance(len(tokens), tokens)
        view.release()
        self.feed.deliver()

    def replay(
        self, start: int, *, keys: FleetKeys | None = None, timeout_ms: int = 20_000
    ) -> list[tuple[int, bytes]]:
        """All messages from a number on, as a client asks for them."""
        client = self.context.socket(zmq.DEALER)
        client.rcvtimeo = client.sndtimeo = timeout_ms  # one that is refused has no peer
        client.linger = 0
        if keys is not None:
            client.curve_serverkey = keys.server.public
            client.curve_publickey = keys.client.public
            client.curve_secretkey = keys.client.secret
        found = []
        with client:
            client.connect(self.replay_endpoint)
            client.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                _, number, payload = client.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    return found
                found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache()
    yield made
    made.close()


def test_what_is_kept_and_dropped_is_published_in_vllms_layout(cache: Cache) -> None:
    cache.compute([1, 2, 3, 4, 5, 6, 7, 8, 1])
    cache.compute([1, 2, 3, 4, 9, 9, 9, 9, 1], salt="")
    cache.compute([5, 5, 5, 5, 6, 6, 6, 6, 1], salt="tenant")
    cache.compute([7, 7, 7, 7], pool=cache.small)  # of the other model: not published
    cache.compute([8, 8, 8, 8, 1])
    while len(found := cache.replay(0)) < 4:
        pass
    batches = [msgspec.msgpack.decode(payload) for _, payload in found]
    assert [number for number, _ in found] == [0, 1, 2, 3]
    for seconds, events, rank in batches:
        assert isinstance(seconds, float)
        assert rank == 0
        assert all(isinstance(event, dict) for event in events)
    first, second, third, fourth = [events for _, events, _ in batches]
    assert first[0] == {"type": "AllBlocksCleared"}
    stored = first[1]
    assert stored == {
        "type": "BlockStored",
        "block_hashes": stored["block_hashes"],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    one, two = stored["block_hashes"]
    assert 0 <= one < 2**64
    assert one != two
    assert second[0]["parent_block_hash"] == one
    assert second[0]["token_ids"] == [9, 9, 9, 9]
    removed, salted = third
    assert removed["type"] == "BlockRemoved"
    assert removed["block_hashes"] == [two, second[0]["block_hashes"][0]], "oldest ends first"
    assert len(salted["extra_keys"]) == len(salted["block_hashes"]) == 2
    assert len(fourth) == 2
    assert [number for number, _ in cache.replay(2)] == [2, 3]


def test_a_subscriber_gets_topic_number_and_batch(cache: Cache) -> None:
    received = None
    cache.subscriber.rcvtimeo = 50
    for token in range(4000):  # a subscriber joins some time after it connects
        cache.compute([token] * 5)
        try:
            received = cache.subscriber.recv_multipart()
            break
        except zmq.Again:
            continue
    assert received is not None
    topic, number, payload = received
    assert topic == b"kv@pod@m"
    assert len(number) == 8
    assert msgspec.msgpack.decode(payload)[1][-1]["type"] == "BlockStored"


def test_an_address_that_is_taken_is_named(cache: Cache) -> None:
    taken = cache.publisher.endpoints[0]
    with pytest.raises(EngineError, match=r"engine\.kv_events='tcp://.*give a free address"):
        KvEventPublisher(TIER, endpoint=taken)


def test_private_texts_are_left_out(cache: Cache) -> None:
    """A subscriber read a prompt that was sent as private."""
    cache.compute([1, 2, 3, 4, 1], salt=PRIVATE_SALT + "tenant")
    cache.compute([5, 5, 5, 5, 1], salt="tenant")
    cache.compute([6, 6, 6, 6, 7, 7, 7, 7, 1], salt="tenant")
    cache.compute([8, 8, 8, 8, 1], salt="tenant")  # the private block was dropped by now
    while len(found := cache.replay(0)) < 4:  # that it begins empty, and three steps
        pass
    events = [e for _, payload in found for e in msgspec.msgpack.decode(payload)[1]]
    told = [e["token_ids"][0] for e in events if e["type"] == "BlockStored"]
    assert told == [5, 6, 8]
    stored = {h for e in events if e["type"] == "BlockStored" for h in e["block_hashes"]}
    assert {h for e in events if e["type"] == "BlockRemoved" for h in e["block_hashes"]} <= stored


def test_with_keys_only_the_fleets_subscribers_get_events() -> None:
    keys = FleetKeys(server=KeyPair.new(), client=KeyPair.new())
    strange = FleetKeys(server=keys.server, client=KeyPair.new())
    cache = Cache(keys)
    try:
        cache.compute([1, 2, 3, 4, 1])
        while not (found := cache.replay(0, keys=keys)):
            pass
        assert len(found) == 1
        for wrong in (None, strange):
            with pytest.raises(zmq.Again):
                cache.replay(0, keys=wrong, timeout_ms=200)
    finally:
        cache.close()


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://eth0:5557"])
def test_other_machines_need_keys(address: str) -> None:
    for name in ("kv_events", "kv_events_replay"):
        flags = {f"engine.{name}": address}
        with pytest.raises(SettingsError, match="could read prompts"):
            load_settings(flags=flags, environ={})
        load_settings(flags={**flags, "engine.replicas_insecure": True}, environ={})
        load_settings(flags={**flags, "engine.replicas_key": "fleet.key"}, environ={})
        load_settings(flags={f"engine.{name}": "tcp://[::1]:5557"}, environ={})
