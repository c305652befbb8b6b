"""A tier on real sockets, in front of mock servers, with books that tests can read."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.mock_upstream import MockRequest, MockScript, MockUpstream, answer_text
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.settings.server_traits import TRAITS
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.upstream.answer import UpstreamAnswer
from outrider.gateway.upstream.attempts import AttemptKind, UpstreamAttempt
from outrider.gateway.upstream.call import Chunk, UpstreamCall
from outrider.gateway.upstream.dialects import dialect_for
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.tier import TierParts, UpstreamTier
from outrider.gateway.upstream.transport import Transport
from outrider.gateway.wiring.credentials import build_credential
from tests.gateway.waiting import until as until

TIMEOUTS = {"connect_s": 2.0, "first_token_s": 2.0, "between_tokens_s": 2.0, "total_s": 10.0}


@dataclass
class Bench:
    """A tier, the servers behind it and what it has booked."""

    tier: UpstreamTier
    mocks: tuple[MockUpstream, ...]
    booked: list[UpstreamAttempt] = field(default_factory=list)

    @property
    def outcomes(self) -> list[tuple[str, str, str | None]]:
        """Kind, outcome and failure of each attempt, in the order in which they ended."""
        return [(a.kind, a.outcome, a.failure) for a in self.booked]

    @property
    def num_asked(self) -> list[int]:
        """Requests for answers that each server has got."""
        return [mock.num_requests for mock in self.mocks]

    def answer(self, kind: AttemptKind = "answer", **call: Any) -> UpstreamAnswer:
        """An answer that has not begun."""
        return self.tier.answer(call_of(**call), kind=kind)

    def nothing_left(self, *, num_unseen: int = 0) -> None:
        """Nothing is in flight, and every request was booked once.

        `num_unseen`: requests given up so early that a busy server may not have seen them.
        """
        assert [replica.in_flight for replica in self.tier.replicas.replicas] == [0] * len(
            self.mocks
        )
        assert 0 <= len(self.booked) - sum(self.num_asked) <= num_unseen


def call_of(
    *,
    endpoint: Endpoint = "chat",
    prompt: str = "Tell me about trees.",
    deadline_in_s: float | None = None,
    affinity: str = "",
    **document: Any,
) -> UpstreamCall:
    """A streamed request, unless the document says otherwise."""
    if endpoint == "chat":
        document["messages"] = [{"role": "user", "content": prompt}]
    else:
        document["prompt"] = prompt
    now_s = time.monotonic()
    return UpstreamCall(
        endpoint=endpoint,
        document={"model": "cloud", "stream": True, **document},
        model="mock-model",
        request_id="req-1",
        arrival_s=now_s,
        hops=("gateway-a", "gateway-b"),
        deadline_s=None if deadline_in_s is None else now_s + deadline_in_s,
        affinity=affinity,
    )


@asynccontextmanager
async def bench(
    *scripts: MockScript | Callable[[MockRequest], MockScript],
    api_key: str | None = None,
    count_text: Callable[[str], int] | None = None,
    rng: random.Random | None = None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """A tier with one replica for each script. Leaves no task, no connection and no socket."""
    mocks = tuple(MockUpstream(script, name=f"m{i}") for i, script in enumerate(scripts))
    for mock in mocks:
        await mock.listen()
    urls = tuple(mock.url for mock in mocks)
    timeouts = {**TIMEOUTS, **settings.pop("timeouts", {})}
    options = UpstreamSettings(url=urls, timeouts=timeouts, **settings)
    booked: list[UpstreamAttempt] = []
    rng = rng or random.Random(1)
    traits = TRAITS[options.server]
    parts = TierParts(
        transport=Transport(
            tier="cloud", timeouts=options.timeouts, max_connections=options.max_connections
        ),
        dialect=dialect_for(traits.dialect, "cloud"),
        replicas=ReplicaSet(
            urls, clock=time.monotonic, rng=rng, has_prefix_cache=traits.has_prefix_cache
        ),
        on_attempt=booked.append,
        clock=time.monotonic,
        rng=rng,
        count_text=count_text,
    )
    environ = {} if api_key is None else {"KEY": api_key}
    keyed = options if api_key is None else options.model_copy(update={"api_key_env": "KEY"})
    tier = UpstreamTier(
        "cloud", options, parts, build_credential("cloud", keyed, parts.dialect, environ)
    )
    before = asyncio.all_tasks()
    await tier.start()
    try:
        yield Bench(tier, mocks, booked)
    finally:
        await tier.close()
        for mock in mocks:
            await mock.refuse()
    assert asyncio.all_tasks() == before


async def read_all(answer: UpstreamAnswer) -> list[Chunk]:
    """Begin it and read all of it."""
    try:
        await answer.begin()
        return [chunk async for chunk in answer.chunks()]
    finally:
        await answer.aclose()


async def read_broken(answer: UpstreamAnswer) -> tuple[list[Chunk], GatewayError]:
    """Begin it and read it until it fails, which it must."""
    received: list[Chunk] = []
    try:
        await answer.begin()
        async for chunk in answer.chunks():
            received.append(chunk)  # noqa: PERF401
    except GatewayError as error:
        return received, error
    finally:
        await answer.aclose()
    raise AssertionError("it did not fail")


def text_of(chunks: list[Chunk]) -> str:
    """The content that a client has seen."""
    return "".join(chunk.content for chunk in chunks)


def expected_text(script: MockScript, call: UpstreamCall | None = None) -> str:
    """The answer of a server that does not fail."""
    return answer_text(script, (call or call_of()).document)
