"""A fleet without engines: the first request has one started, and waits for it within bounds."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from outrider.engine.errors import (
    EngineDiedError,
    EngineError,
    EngineNotStartedError,
    QueueFullError,
)
from outrider.engine.events import Failed, Finished
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.fleet.addresses import FoundReplicas, WantedTiers
from outrider.gateway.engines.fleet.demand import Demand, Needs
from outrider.gateway.engines.fleet.discovery import DiscoveredPool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.upstream import build_upstream
from outrider.verifier.params import Tier
from tests.gateway.conftest import parts_over, running, wait_for
from tests.gateway.engines.backends.clients import becomes, collect, started, tokens
from tests.gateway.engines.fleet.replicas import mortal
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.scripted_engine import make_request

PAGE = "http://fleet/"


class ScriptedFleet:
    """Starts an engine for what is wanted, if it may; `stop` scales to zero."""

    def __init__(self, *kinds: Sequence[Tier]) -> None:
        self.kinds = frozenset(map(frozenset, kinds or [("large",)]))
        self.asked: list[WantedTiers] = []
        self.starts = True
        self.is_reached = True
        self.addresses: dict[str, Needs] = {}
        self.num_started = 0

    async def resolve(self, entry: str, wanted: WantedTiers) -> FoundReplicas:
        assert entry == PAGE
        if not self.is_reached:
            raise OSError("no answer")
        if wanted:
            self.asked.append(wanted)
        for needs in map(frozenset, wanted if self.starts else ()):
            if not any(needs <= kind for kind in self.addresses.values()):
                self.num_started += 1
                kind = min((kind for kind in self.kinds if needs <= kind), key=len)
                self.addresses[f"tcp://x:{self.num_started}"] = kind
        return FoundReplicas(frozenset(self.addresses), self.kinds)

    def make(self, address: str) -> EngineReplica:
        return mortal(address, tiers=tuple(self.addresses[address]))[0]

    def stop(self) -> None:
        self.addresses.clear()


@asynccontextmanager
async def pool_of(fleet: ScriptedFleet, **bounds: Any) -> AsyncIterator[DiscoveredPool]:
    pool = DiscoveredPool(
        [PAGE], fleet.make, resolve=fleet.resolve, interval_s=0.01, demand=Demand(**bounds)
    )
    async with started(pool):
        yield pool


async def test_the_first_request_has_an_engine_started_and_waits_for_it() -> None:
    fleet = ScriptedFleet()
    async with pool_of(fleet) as pool:
        assert pool.is_ready
        assert pool.is_asleep
        with pytest.raises(EngineNotStartedError, match="the first request"):
            await pool.info()
        assert fleet.num_started == 0
        both = await asyncio.gather(
            *(collect(pool, name, prompt=(5,), max_tokens=3) for name in "ab")
        )
        assert [tokens(events) for events in both] == [[5, 6, 7], [5, 6, 7]]
        assert fleet.num_started == 1
        assert not pool.is_asleep
        num_asked = len(fleet.asked)

        fleet.stop()  # to zero again: its models stay known, its counters stay counted
        await becomes(lambda: pool.is_asleep)
        assert list((await pool.info()).tiers) == ["large"]
        assert (await pool.stats()).tiers["large"].num_output_tokens == 6
        assert len(fleet.asked) == num_asked
        await becomes(lambda: not pool.states())
        assert tokens(await collect(pool, "c", prompt=(7,), max_tokens=1)) == [7]
        assert fleet.num_started == 2


async def test_the_wait_is_bounded_and_what_waits_too() -> None:
    fleet = ScriptedFleet()
    fleet.starts = False
    endings: list[Finished | Failed | None] = []
    async with pool_of(fleet, max_waiting=1) as pool:
        waiting = asyncio.create_task(collect(pool, "a"))
        await becomes(lambda: bool(fleet.asked))
        assert fleet.asked[0] == [["large"]]
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            await collect(pool, "b")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with pool_of(fleet, start_within_s=0.2) as pool:
        stream = pool.submit(make_request("c"), endings.append)
        with pytest.raises(EngineNotStartedError, match=r"within 0\.2 s") as told:
            await anext(aiter(stream))
        assert told.value.retry_after_s > 0
        assert endings == [None]
        assert not pool.demand.wanted()
        assert pool.is_asleep


async def test_a_client_that_leaves_no_longer_waits() -> None:
    fleet = ScriptedFleet()
    fleet.starts = False
    async with pool_of(fleet, max_waiting=1) as pool:
        for name in ("a", "b"):  # the first one's place is free again
            waiting = asyncio.create_task(collect(pool, name))
            await becomes(lambda: bool(pool.demand.wanted()))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert not pool.demand.wanted()
        waiting = asyncio.create_task(collect(pool, "c"))
        await becomes(lambda: bool(pool.demand.wanted()))
    assert isinstance((await waiting)[-1], Failed)  # the pool was closed


async def test_an_engine_of_the_tier_is_started_and_another_tier_is_not_waited_for() -> None:
    fleet = ScriptedFleet(("small",), ("large",))
    async with pool_of(fleet) as pool:
        request = replace(make_request("a", max_tokens=1), tier="small")
        assert tokens([event async for event in pool.submit(request)])
        assert list(fleet.addresses.values()) == [{"small"}]
        await pool.until_known(("small",))
        assert list((await pool.info()).tiers) == ["small"]
        await pool.until_known(("small", "large"))
        assert list((await pool.info()).tiers) == ["small", "large"]
        assert len(fleet.addresses) == 2


@pytest.mark.parametrize(
    ("kinds", "is_reached", "error"),
    [((("small",),), True, EngineError), ((("large",),), False, EngineDiedError)],
    ids=["no engine has the tier", "the page cannot be reached"],
)
async def test_what_cannot_be_started_is_not_waited_for(
    kinds: tuple[tuple[Tier, ...], ...], is_reached: bool, error: type[EngineError]
) -> None:
    fleet = ScriptedFleet(*kinds)
    async with pool_of(fleet) as pool:
        fleet.is_reached = is_reached
        await becomes(lambda: pool.is_ready is is_reached)
        with pytest.raises(error):
            await collect(pool, "a")
        assert fleet.num_started == 0


MESSAGE = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def asleep(fleet: ScriptedFleet, client: ScriptedClient) -> DiscoveredPool:
    return DiscoveredPool(
        [PAGE],
        lambda address: EngineReplica(address, client),
        resolve=fleet.resolve,
        interval_s=0.01,
        demand=Demand(start_within_s=0.5),
    )


@contextmanager
def gateway(pool: DiscoveredPool, tokenizer: ChatTokenizer, **parts: Any) -> Iterator[httpx.Client]:
    app = build_app(parts_over(pool, tokenizer, **parts))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        wait_for(lambda: http.get("/ready").status_code == 200)
        yield http


def test_a_gateway_without_engines_is_ready_and_its_first_client_waits(
    tokenizer: ChatTokenizer,
) -> None:
    fleet = ScriptedFleet(("small", "large"))
    pool = asleep(fleet, ScriptedClient(vocab_size=420, script=lambda _: Script()))
    with gateway(pool, tokenizer) as http:
        assert http.get("/ready").json() == {"ready": True, "replicas": {"up": 0, "of": 0}}
        assert http.get("/v1/models").status_code == 503  # a list starts nothing
        assert http.get("/metrics").status_code == 200
        assert not fleet.asked
        fleet.starts = False
        answer = http.post("/v1/chat/completions", json=MESSAGE)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_not_started"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-should-retry"] == "true"
        fleet.starts = True
        pool.demand.start_within_s = 60.0
        answer = http.post("/v1/chat/completions", json=MESSAGE)
        assert answer.status_code == 200, answer.text
        assert http.get("/ready").json() == {"ready": True, "replicas": {"up": 1, "of": 1}}
        assert http.get("/v1/models").status_code == 200


def test_an_upstream_tier_answers_while_an_engine_is_started(tokenizer: ChatTokenizer) -> None:
    fleet = ScriptedFleet(("small", "large"))
    fleet.starts = False
    pool = asleep(fleet, ScriptedClient(vocab_size=420, script=lambda _: Script()))
    with mock_in_thread(MockScript()) as mock:
        settings = Settings.model_validate({"tiers": {"cloud": {"url": mock.url, "model": "m"}}})
        metrics = GatewayMetrics()
        cloud = build_upstream(settings, {}, ("small", "large"), UpstreamMetrics(metrics.registry))
        with gateway(pool, tokenizer, upstream=cloud, metrics=metrics) as http:
            answer = http.post("/v1/chat/completions", json=MESSAGE)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-outrider-tier"] == "cloud"
            wait_for(lambda: bool(fleet.asked))  # the next request finds an engine
            private = {**MESSAGE, "outrider": {"privacy": "private"}}
            answer = http.post("/v1/chat/completions", json=private)
            assert answer.status_code == 503, "it waits for an engine of the fleet"
