"""Engines that several gateways share, over TCP: who is let in, whose answer is whose, and ends."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from outrider.engine.events import Failed, Finished, TokensEmitted
from outrider.gateway.engines.backends.connected_gateway import (
    ConnectedGateway,
    ListenerBounds,
    RequestsInFlight,
)
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import (
    FleetKeys,
    KeyPair,
    read_fleet_keys,
    require_safe,
    write_fleet_keys,
)
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.replica_link import ReplicaRefusedError
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.backends.wire import (
    PROTOCOL_VERSION,
    Abort,
    Events,
    GetStats,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    Submit,
    SwitchTier,
    Welcome,
    decode_reply,
    encode,
)
from outrider.gateway.settings.tree import SettingsError
from tests.gateway.engines.backends.clients import STEP_MS, becomes, collect, run, started, tokens
from tests.gateway.engines.backends.replicas import Replica, replica
from tests.gateway.scripted_engine import (
    CRASH_IN_STEP,
    REFUSE_TOO_LONG,
    make_request,
)

KEYS = FleetKeys(server=KeyPair.new(), client=KeyPair.new())
HASTY = ReconnectPolicy(resume_within_s=0)


@pytest.mark.slow
async def test_two_gateways_use_the_same_ids_and_get_their_own_answers() -> None:
    with replica(STEP_MS, keys=KEYS) as engine:
        first, second = (RemoteEngineClient(engine.endpoint, KEYS) for _ in range(2))
        async with started(first), started(second):
            one, two = await asyncio.gather(
                collect(first, "same", prompt=(10,), max_tokens=20),
                collect(second, "same", prompt=(1000,), max_tokens=20),
            )
            assert tokens(one) == list(range(10, 30))
            assert tokens(two) == list(range(1000, 1020))
            assert {event.request_id for event in (*one, *two)} == {"same"}
            stats = await asyncio.gather(first.stats(), second.stats())
            assert all(each.tiers["large"].num_output_tokens == 40 for each in stats)
            with pytest.raises(PromptTooLongError, match="9000"):
                await collect(first, "long", prompt=(REFUSE_TOO_LONG,))


@pytest.mark.slow
async def test_a_gateway_that_leaves_takes_its_requests_along() -> None:
    with replica(STEP_MS) as engine:
        stays, leaves = (RemoteEngineClient(engine.endpoint) for _ in range(2))
        async with started(stays):
            async with started(leaves):
                stream = leaves.submit(make_request("a", max_tokens=10**6))
                await anext(stream)
                assert "a" in engine.engine.running
            await becomes(lambda: not engine.engine.running)
            assert tokens(await collect(stays, "b", prompt=(1,), max_tokens=2)) == [1, 2]
            assert isinstance([event async for event in stream][-1], Failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "error", "says"),
    [
        (replace(KEYS, client=KeyPair.new()), KEYS, ReplicaRefusedError, "both need the same key"),
        (replace(KEYS, server=KeyPair.new()), KEYS, EngineError, "key file the same at both"),
        (None, KEYS, EngineError, "may want a key"),
        (KEYS, None, EngineError, "key file the same at both"),
    ],
    ids=["stranger with the server's key", "other server", "no key", "key for a plain engine"],
)
async def test_a_wrong_key_is_no_way_in(
    ours: FleetKeys | None, theirs: FleetKeys | None, error: type[EngineError], says: str
) -> None:
    with replica(keys=theirs) as engine:
        client = RemoteEngineClient(engine.endpoint, ours)
        with pytest.raises(error, match=says):
            await client.start()
        assert not client.is_ready
        assert engine.engine.num_steps == 0


@pytest.mark.slow
async def test_another_version_and_other_models_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with replica(tokenizers={"large": "abc"}) as engine:
        expected: Future[Any] = Future()
        expected.set_result({"large": "xyz", "small": "abc"})
        other = RemoteEngineClient(engine.endpoint, tokenizers=expected)
        with pytest.raises(ReplicaRefusedError, match=r"scripted as its large model.*abc.*xyz"):
            await other.start()
        monkeypatch.setattr(
            "outrider.gateway.engines.backends.replica_link.PROTOCOL_VERSION",
            PROTOCOL_VERSION + 1,
        )
        newer = RemoteEngineClient(engine.endpoint)
        versions = rf"version {PROTOCOL_VERSION} .* version {PROTOCOL_VERSION + 1}: install"
        with pytest.raises(ReplicaRefusedError, match=versions):
            await newer.start()


@pytest.mark.slow
async def test_a_gateway_waits_for_an_engine_that_is_not_there_or_loads() -> None:
    loading = Replica()
    client = RemoteEngineClient(loading.endpoint)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    loading.stop()  # the address is free again: nothing listens there
    await becomes(lambda: "nothing listens" in client.not_ready_reason)
    with replica(endpoint=loading.endpoint):
        await starting
        assert client.is_ready
        await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["drained", "crashed"])
async def test_answers_go_on_with_the_next_engine_at_the_address(ends: str) -> None:
    """An engine that drains its time away, or dies, in the middle of an answer."""

    first = Replica(STEP_MS).start()
    async with started(RemoteEngineClient(first.endpoint)) as client:
        stream = client.submit(make_request("a", prompt=(10,), max_tokens=400))
        events = [await anext(stream) for _ in range(5)]
        if ends == "crashed":
            crash = client.submit(make_request("b", prompt=(CRASH_IN_STEP,)))
            crashing = asyncio.create_task(anext(crash))  # type: ignore[arg-type, var-annotated]
            await becomes(lambda: first.exit_status is not None)
            crashing.cancel()
            await asyncio.gather(crashing, return_exceptions=True)
        await asyncio.to_thread(first.stop)
        await becomes(lambda: not client.is_ready)
        with replica(STEP_MS, endpoint=first.endpoint):
            events += [event async for event in stream]
            assert tokens(events) == list(range(10, 410))
            assert isinstance(events[-1], Finished)


@pytest.mark.slow
async def test_without_patience_a_lost_engine_ends_the_answer_at_once() -> None:
    engine = Replica(STEP_MS).start()
    async with started(RemoteEngineClient(engine.endpoint, policy=HASTY)) as client:
        stream = client.submit(make_request("a", max_tokens=10**6))
        await anext(stream)
        await asyncio.to_thread(engine.stop)
        last = [event async for event in stream][-1]
        assert isinstance(last, Failed)
        assert last.code == EngineDiedError.code
        with pytest.raises(EngineDiedError):
            await client.stats()


@pytest.mark.slow
async def test_a_request_that_two_engines_died_with_is_refused_and_a_cut_line_is_no_death() -> None:
    async def lose_line(client: RemoteEngineClient) -> None:
        assert client._link is not None
        client._link.kill("the line was cut")
        await becomes(lambda: client.is_ready)

    async def crash(endpoint: str) -> None:
        async with started(RemoteEngineClient(endpoint, policy=HASTY)) as other:
            await collect(other, "crash", prompt=(CRASH_IN_STEP,))

    engine = Replica(STEP_MS).start()
    endpoint = engine.endpoint
    async with started(RemoteEngineClient(endpoint)) as client:
        stream = client.submit(make_request("a", prompt=(10,), max_tokens=10**5))
        await anext(stream)
        for _ in range(3):
            await lose_line(client)
            assert isinstance(await anext(stream), TokensEmitted)
        for _ in range(2):
            await crash(endpoint)
            await asyncio.to_thread(engine.stop)
            engine = Replica(STEP_MS, endpoint=endpoint).start()
            await becomes(lambda: client.is_ready)
        await asyncio.to_thread(engine.stop)
        events = [event async for event in stream]
        assert isinstance(events[-1], Failed)
        assert events[-1].code == CrashSuspectError.code


@pytest.mark.slow
async def test_while_it_drains_an_engine_ends_what_it_has_and_takes_nothing_new() -> None:
    engine = Replica(STEP_MS).start()
    async with started(RemoteEngineClient(engine.endpoint, policy=HASTY)) as client:
        stream = client.submit(make_request("a", prompt=(1,), max_tokens=300))
        await anext(stream)
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 60.0))
        await becomes(lambda: client.is_draining)
        assert not client.is_ready
        with pytest.raises(EngineDiedError, match="being stopped"):
            await collect(client, "b")
        assert tokens([event async for event in stream]) == list(range(1, 301))
        await stopping
        assert engine.exit_status == 0


@pytest.mark.slow
async def test_an_engine_that_is_silent_is_given_up() -> None:
    policy = ReconnectPolicy(unready_after_s=0.1, stall_timeout_s=0.3, resume_within_s=0)
    with replica('{"step_s": 1.0}') as engine:
        async with started(RemoteEngineClient(engine.endpoint, policy=policy)) as client:
            events = await collect(client, "a", max_tokens=3)
            assert isinstance(events[-1], Failed)
            assert not client.is_ready


# ---- what a peer with the key may do ------------------------------------------------------------


class Peer:
    """A gateway that speaks frame by frame. A context manager."""

    def __init__(self, endpoint: str, *, greets: bool = True) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = 30_000
        self._socket.connect(endpoint)
        if greets:
            self.send(Hello(PROTOCOL_VERSION))
            assert isinstance(self.received(), Welcome)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, *messages: Any) -> None:
        frames = [each if isinstance(each, bytes) else encode(each) for each in messages]
        self._socket.send_multipart(frames)

    def received(self) -> Any:
        return decode_reply(self._socket.recv())

    def heard_until(self, kind: type[Any]) -> Any:
        while not isinstance(found := self.received(), kind):
            pass
        return found


def serves(engine: Replica) -> None:
    """Another gateway's answer is what it should be."""

    async def main() -> None:
        async with started(RemoteEngineClient(engine.endpoint)) as client:
            assert tokens(await collect(client, "z", prompt=(7,), max_tokens=3)) == [7, 8, 9]

    run(main())


@pytest.mark.slow
def test_malformed_messages_end_themselves_and_never_the_engine() -> None:
    rng = random.Random(5)
    nested = b"\x91" * 100_000
    with replica() as engine:
        garbage = [rng.randbytes(rng.randrange(0, 100)) for _ in range(50)]
        for frames in ([b""], [nested], *([each] for each in garbage), [encode(Ping()), b"x"]):
            with Peer(engine.endpoint) as peer:
                peer.send(*frames)
                assert isinstance(peer.heard_until(Goodbye), Goodbye)
        with Peer(engine.endpoint) as peer:
            wrong = msgspec.to_builtins(make_request("w"))
            wrong["sampling"]["temperature"] = -1
            peer.send(msgspec.msgpack.encode(["submit", wrong]))
            refused = peer.received()
            assert isinstance(refused, Refused)
            assert refused.request_id == "w"
            assert "temperature=-1" in refused.error.message
            peer.send(Submit(make_request("i" * 300)))
            assert "more than 256 characters" in peer.heard_until(Refused).error.message
            peer.send(Ping())
            assert isinstance(peer.heard_until(Pong), Pong)
        with Peer(engine.endpoint, greets=False) as peer:
            peer.send(Submit(make_request("early")))
            assert "connect again" in peer.received().reason
        serves(engine)


@pytest.mark.slow
def test_what_one_gateway_can_make_an_engine_hold_is_bounded() -> None:
    bounds = ListenerBounds(max_gateways=2, max_requests=3, max_message_bytes=50_000)
    with replica(STEP_MS, bounds=bounds) as engine:
        with Peer(engine.endpoint) as peer, Peer(engine.endpoint) as other:
            for number in range(4):
                peer.send(Submit(make_request(f"r{number}", max_tokens=10**6)))
            refused = peer.heard_until(Refused)
            assert (refused.request_id, refused.error.name) == ("r3", QueueFullError.__name__)
            peer.send(Submit(make_request("r0", max_tokens=10**6)))
            assert peer.heard_until(Refused).error.name == InvalidRequestError.__name__
            with Peer(engine.endpoint, greets=False) as third:
                third.send(Hello(PROTOCOL_VERSION))
                assert "2 gateways are connected" in third.received().reason
            other.send(bytes(60_000))  # the socket closes such a connection
            other_requests = len(engine.engine.running)
            assert other_requests == 3
            peer.send(*[GetStats(1)])
            for number in range(20 * bounds.max_calls):
                peer.send(GetStats(number))
            assert peer.heard_until(Goodbye).reason
        assert _eventually(lambda: not engine.engine.running)


@pytest.mark.slow
def test_a_silent_gateway_s_requests_are_aborted_and_it_is_told() -> None:
    bounds = ListenerBounds(silent_after_s=0.2)
    with replica(STEP_MS, bounds=bounds) as engine, Peer(engine.endpoint) as peer:
        peer.send(Submit(make_request("a", max_tokens=10**6)))
        assert "silent for 0.2 s" in peer.heard_until(Goodbye).reason
        assert _eventually(lambda: not engine.engine.running)
        peer.send(Ping())
        assert "connect again" in peer.received().reason


@pytest.mark.slow
def test_a_gateway_of_this_machine_may_be_silent_until_it_has_gone(tmp_path: Path) -> None:
    """It was stopped for a while, or has ended without a word."""
    bounds = ListenerBounds(silent_after_s=0.05)
    with replica(STEP_MS, endpoint=f"ipc://{tmp_path}/line", bounds=bounds) as engine:
        with Peer(engine.endpoint) as silent:
            silent.send(Submit(make_request("held", max_tokens=2, may_escalate=True)))
            assert isinstance(silent.heard_until(Pong), Pong), "unasked: to see if it is there"
            silent.send(Submit(make_request("a", max_tokens=3)))
            assert isinstance(silent.heard_until(Events), Events), "it is known still"
            assert "held" in engine.engine.running
        assert _eventually(lambda: not engine.engine.running)


@pytest.mark.slow
def test_a_gateway_cannot_change_requests_of_another() -> None:
    with (
        replica(STEP_MS) as engine,
        Peer(engine.endpoint) as victim,
        Peer(engine.endpoint) as other,
    ):
        for peer, prompt in ((victim, 10), (other, 2000)):
            peer.send(Submit(make_request("1/a", (prompt,), max_tokens=200)))
            assert isinstance(peer.heard_until(Events), Events)
        assert len(engine.engine.running) == 2
        victims, others = engine.engine.running
        for known in (victims, others, "never heard of"):
            if known != "1/a":  # which is its own request, too
                other.send(Abort(known))
                other.send(SwitchTier(known, "small"))
        other.send(Abort("1/a"))
        assert _eventually(lambda: list(engine.engine.running) == [victims])
        assert engine.engine.running[victims].tier == "large"


def test_requests_of_the_same_id_are_told_apart() -> None:
    rng = random.Random(3)
    requests = RequestsInFlight()
    gateways = [
        ConnectedGateway(number=number, identity=bytes([number]), heard_s=0.0)
        for number in range(4)
    ]
    own: dict[str, tuple[ConnectedGateway, str]] = {}
    for _ in range(2000):
        gateway, own_id = rng.choice(gateways), rng.choice(("a", "1/a", "2/a", "1/1/a", "2/1/a"))
        if own_id in gateway.engine_ids:
            engine_id = gateway.engine_ids[own_id]
            assert requests.remove(engine_id) == own.pop(engine_id) == (gateway, own_id)
            assert requests.owner(engine_id) is None
        else:
            engine_id = requests.add(gateway, own_id)
            assert engine_id not in own
            own[engine_id] = (gateway, own_id)
        assert all(requests.owner(each) == found for each, found in own.items())


@pytest.mark.slow
async def test_one_machine_has_one_clock_and_no_copies_of_requests(tmp_path: Path) -> None:
    with replica('{"step_s": 0.05}', endpoint=f"ipc://{tmp_path}/line") as engine:
        async with started(RemoteEngineClient(engine.endpoint)) as client:
            before_s = time.monotonic()
            sent = replace(make_request("a"), arrival_s=before_s - 7.0)
            await anext(client.submit(sent))
            (running,) = engine.engine.running.values()
            assert running.request == sent
        with Peer(engine.endpoint) as peer:
            peer.send(Submit(replace(make_request("b"), arrival_s=1e12)))
            assert isinstance(peer.heard_until(Events), Events)
            assert engine.engine.running["b"].request.arrival_s <= time.monotonic()


@pytest.mark.slow
async def test_arrivals_are_ages_on_the_way() -> None:
    with replica('{"step_s": 0.05}') as engine:
        async with started(RemoteEngineClient(engine.endpoint)) as client:
            before_s = time.monotonic()
            stream = client.submit(replace(make_request("a"), arrival_s=before_s - 7.0))
            await anext(stream)
            (running,) = engine.engine.running.values()
            assert running.request.arrival_s == pytest.approx(before_s - 7.0, abs=5.0)
            assert running.request.arrival_s <= time.monotonic() - 7.0
    with replica() as engine, Peer(engine.endpoint) as peer:
        peer.send(Submit(replace(make_request("b"), arrival_s=1e12)))
        assert isinstance(peer.heard_until(Events), Events)


# ---- keys and addresses -------------------------------------------------------------------------


def test_key_files_are_private_and_are_not_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.key"
    write_fleet_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    keys = read_fleet_keys(path)
    assert len({keys.server.public, keys.server.secret, keys.client.public}) == 3
    assert not caplog.records
    with pytest.raises(SettingsError, match="exists already"):
        write_fleet_keys(path)
    os.chmod(path, 0o640)
    assert read_fleet_keys(path) == keys
    assert "can be read by other users" in caplog.text
    text = path.read_text()
    other = KeyPair.new().public.decode()
    for broken in ("", "[server]\n", "x = [", text.replace(keys.server.public.decode(), other)):
        path.write_text(broken)
        with pytest.raises(SettingsError, match="not a key file"):
            read_fleet_keys(path)
    with pytest.raises(SettingsError, match="keygen"):
        read_fleet_keys(tmp_path / "missing")


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7600", "tcp://0.0.0.0:7600", "tcp://host:1"])
def test_other_machines_need_keys_or_consent(address: str) -> None:
    with pytest.raises(SettingsError, match="--insecure"):
        require_safe(address, None)
    require_safe(address, KEYS)
    require_safe(address, None, insecure=True)
    require_safe("tcp://127.0.0.1:7600", None)
    require_safe("tcp://[::1]:7600", None)


@pytest.mark.parametrize("address", ["http://a:1", "tcp://a", "tcp://:7600", "tcp://a:b", "7600"])
def test_addresses_have_a_form(address: str) -> None:
    with pytest.raises(SettingsError, match="tcp://HOST:PORT"):
        require_safe(address, KEYS)


@pytest.mark.slow
def test_a_port_in_use_is_said() -> None:
    with replica() as engine, pytest.raises(SettingsError, match=r"cannot listen.*in use"):
        EngineListener(engine.endpoint, None, ListenerBounds())


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True
