"""Answers from the cache, one computation for equal requests that wait, and the rules of both."""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from outrider.gateway.answering.caching.cache_metrics import CacheMetrics, CacheStatus
from outrider.gateway.answering.caching.entry import CachedEntry, CacheStore
from outrider.gateway.answering.candidates.fallback import FallbackChain
from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.metering.rows import CachedUsage

logger = logging.getLogger(__name__)

_PARAM: Final = "outrider.cache"
_WITHHELD: Final = re.compile(rb'"finish_reason":\s*"(content_filter|error)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """Rules for which answers the cache keeps, and for whom."""

    is_default: bool = False
    """Also answers to requests that do not ask for it."""
    keys: frozenset[str] | None = None
    """Names or ids of keys and teams that take part; None: all."""
    tiers: frozenset[str] | None = None
    """Tiers whose answers are kept; None: all."""
    max_entry_bytes: int = 2**20
    is_charged: bool = False
    """A hit is charged like the answer that it repeats."""

    def allows(self, principal: Principal) -> bool:
        """Return whether the key's requests take part."""
        names = {principal.key_id, principal.name, principal.team_id}
        return self.keys is None or not self.keys.isdisjoint(names)

    def keeps(self, tier: str) -> bool:
        """Return whether the tier's answers are kept."""
        return self.tiers is None or tier in self.tiers


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A request that is being answered."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Equal requests wait for it."""
    entry: CachedEntry | None = None
    """What the request became."""


@dataclass(slots=True, kw_only=True)
class AnswerCache:
    """Serves requests from `store` where they ask for it and may. For one event loop."""

    store: CacheStore | None
    rules: CacheRules
    version: Callable[[], bytes | None]
    """Returns bytes that change with the models and the settings; None while the models are not
    known."""
    wall_clock: Callable[[], float]
    """Seconds since 1970."""
    metrics: CacheMetrics
    _flights: dict[bytes, _Flight] = field(default_factory=dict)

    def serve(self, chain: FallbackChain) -> "FallbackChain | CachedAnswer":
        """Return the chain, or an answer that looks into the cache first.

        Raises BadRequestError for a cache that is asked for and cannot be had.
        """
        basis = chain.parsed
        if self.store is None and not _may_ask(basis.body.raw):
            return chain
        document = basis.body.document
        wish = _wish(document)
        if self.store is None:
            if wish == "on":
                raise BadRequestError(
                    f"{_PARAM}: this server keeps no answers; its operator sets cache.store.",
                    param=_PARAM,
                )
            return chain
        if wish == "off" or (wish is None and not self.rules.is_default):
            return chain
        if reason := self._obstacle(basis, document):
            if wish == "on" and reason == "sampled":
                raise BadRequestError(
                    f"{_PARAM}: a sampled answer is kept only with a seed, or each repetition "
                    "would be the same draw; set seed, or temperature to 0.",
                    param=_PARAM,
                )
            return self._passed_by(chain)
        version = self.version()
        if version is None:
            return self._passed_by(chain)
        return CachedAnswer(self, self.store, answer_key(basis, document, version), chain)

    def _obstacle(self, basis: ParsedRequest, document: Mapping[str, Any]) -> str:
        """Return why this answer cannot be kept; empty where it can."""
        context = basis.context
        local = basis.local
        temperature = document.get("temperature") if local is None else local.request.temperature
        seed = document.get("seed") if local is None else local.request.seed
        if temperature != 0 and seed is None:
            return "sampled"
        if basis.constraints.is_private:
            return "private"
        if context.with_trace:
            return "traced"
        return "" if self.rules.allows(context.principal) else "key"

    def _passed_by(self, chain: FallbackChain) -> FallbackChain:
        self.metrics.count("bypass")
        chain.headers["x-outrider-cache"] = "bypass"
        return chain

    def is_kept(self, chain: FallbackChain, parts: Sequence[bytes]) -> bool:
        """Return whether a whole answer may be given to others."""
        facts = chain.facts
        return (
            facts is not None
            and facts.outcome == "stop"
            and not chain.is_unchecked
            and not facts.is_degraded
            and not facts.is_cut_by_limit
            and chain.arm == chain.parsed.context.arm  # else it was answered in no arm
            and self.rules.keeps(facts.tier)
            and sum(map(len, parts)) <= self.rules.max_entry_bytes
            and not any(_WITHHELD.search(part) for part in parts[-8:])
        )

    def begin(self, key: bytes) -> _Flight:
        """Note that a request with this key is being answered."""
        flight = self._flights[key] = _Flight()
        return flight

    def flight(self, key: bytes) -> _Flight | None:
        """Return the equal request that is being answered."""
        return self._flights.get(key)

    def end(self, key: bytes, flight: _Flight) -> None:
        """Wake the requests that wait for an answer, whatever became of it."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.ended.set()


class CachedAnswer:
    """One request's answer: the kept one, that of an equal request under way, or its own.

    A request that waits for an equal one sends nothing until that is complete. If it fails, or its
    answer may not be shared, each waiting request is answered by itself.
    """

    def __init__(
        self, cache: AnswerCache, store: CacheStore, key: bytes, chain: FallbackChain
    ) -> None:
        self.is_streamed = chain.is_streamed
        self.is_private = chain.is_private
        self.deadline_s = chain.deadline_s
        self._cache = cache
        self._store = store
        self._key = key
        self._chain = chain
        self._facts: AnswerFacts | None = None
        self._headers: dict[str, str] = {}

    @property
    def facts(self) -> AnswerFacts | None:
        """The facts of the kept answer, or of its own."""
        return self._facts or self._chain.facts

    @property
    def arm(self) -> str:
        """The request's arms of experiments."""
        return self._chain.arm

    @property
    def is_unchecked(self) -> bool:
        """Whether a check gave no verdict, and was to be passed over then."""
        return self._chain.is_unchecked

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the answer, with `x-outrider-cache`."""
        return {**self._chain.headers, **self._headers}

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body. Raises as the chain does; see `FallbackChain.parts`."""
        entry = await self._store.get(self._key)
        status: Literal["hit", "shared"] = "hit"
        if entry is None and (flight := self._cache.flight(self._key)) is not None:
            await flight.ended.wait()
            entry, status = flight.entry, "shared"
        if entry is not None:
            await self._admit(entry)
            self._note(entry, status)
            *beginning, last = entry.parts
            if beginning:  # the same events, in one write
                yield b"".join(beginning)
            yield last
            return
        self._set_status("miss")
        if self._cache.flight(self._key) is not None:  # another one began meanwhile
            async with aclosing(self._chain.parts()) as parts:
                async for part in parts:
                    yield part
            return
        async with aclosing(self._answered()) as parts:
            async for part in parts:
                yield part

    async def _answered(self) -> AsyncGenerator[bytes]:
        """Answer it, and keep the answer."""
        flight = self._cache.begin(self._key)
        kept: list[bytes] = []
        num_bytes, most = 0, self._cache.rules.max_entry_bytes
        try:
            async with aclosing(self._chain.parts()) as parts:
                async for part in parts:
                    num_bytes += len(part)
                    if num_bytes <= most:
                        kept.append(part)
                    else:
                        kept.clear()
                    yield part
            if num_bytes <= most and self._cache.is_kept(self._chain, kept):
                flight.entry = self._entry(kept)
                await self._store.put(self._key, flight.entry)
        finally:
            self._cache.end(self._key, flight)

    def _entry(self, parts: Collection[bytes]) -> CachedEntry:
        facts = self._chain.facts
        assert facts is not None
        return CachedEntry(
            parts=tuple(parts),
            tier=facts.tier,
            model=self._chain.parsed.upstream_model or "",
            num_prompt_tokens=facts.num_prompt_tokens,
            num_completion_tokens=facts.num_tokens,
            made_at=self._cache.wall_clock(),
            is_streamed=self.is_streamed,
            headers=dict(self._chain.headers),
        )

    async def _admit(self, entry: CachedEntry) -> None:
        """Book the hit. Raises RateLimitError or BudgetError where its charge has no room."""
        meter = self._chain.parsed.context.meter
        if meter is None:
            return
        await meter.serve_cached(
            CachedUsage(
                tier=entry.tier,
                model=entry.model,
                num_prompt=entry.num_prompt_tokens,
                num_completion=entry.num_completion_tokens,
                is_charged=self._cache.rules.is_charged,
            )
        )

    def _note(self, entry: CachedEntry, status: Literal["hit", "shared"]) -> None:
        self._headers.update(entry.headers)
        self._set_status(status)
        age_s = max(self._cache.wall_clock() - entry.made_at, 0.0)
        self._headers["age"] = str(int(age_s))
        self._facts = AnswerFacts(
            tier=entry.tier,
            reason="cache",
            job_id=self._chain.parsed.context.request_id,
            outcome="stop",
            num_tokens=entry.num_completion_tokens,
            num_prompt_tokens=entry.num_prompt_tokens,
        )

    def _set_status(self, status: CacheStatus) -> None:
        self._cache.metrics.count(status)
        self._headers["x-outrider-cache"] = status


def _may_ask(body: bytes) -> bool:
    """Return whether a request may ask for the cache, without reading it."""
    return b'"cache"' in body


def _wish(document: Mapping[str, Any]) -> Literal["on", "off"] | None:
    """Return what the request says of the cache; its schema was checked before."""
    options = document.get("outrider")
    wish = options.get("cache") if isinstance(options, dict) else None
    return wish if wish in ("on", "off") else None


_LABELS: Final = frozenset(
    {
        *("user", "metadata", "safety_identifier", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "anthropic_billing",
    }
)
"""Fields that change no answer."""
_OPTIONS: Final = "outrider"
_FREE_OPTIONS: Final = frozenset({"cache", "deadline_ms", "retention_s", "slo"})
"""Options that bound the time of an answer, not its text."""
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def answer_key(basis: ParsedRequest, document: dict[str, Any], version: bytes) -> bytes:
    """Return 32 bytes that are equal for requests whose answers are distributed alike.

    They cover the request without its labels, whatever the order of its fields; the models behind
    its first one; its arms of experiments; the tiers that its key may use; the tenant's salt; the
    checks of its answer; and `version`, which stands for the gateway's models and settings.
    """
    context = basis.context
    principal = context.principal
    kept = {name: value for name, value in document.items() if name not in _LABELS}
    options = kept.get(_OPTIONS)
    if isinstance(options, dict):
        kept[_OPTIONS] = {k: v for k, v in options.items() if k not in _FREE_OPTIONS}
        if not kept[_OPTIONS]:
            del kept[_OPTIONS]
    tiers = principal.scopes.tiers
    shaped = (
        basis.endpoint,
        kept,
        basis.next_models,
        context.arm,
        None if tiers is None else sorted(tiers),
        principal.cache_salt,
        () if context.check is None else context.check.names,
    )
    return hashlib.blake2b(_encode(shaped), key=version, digest_size=32).digest()
