"""The shared dependencies of one upstream tier's parts."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.gateway.settings.server_traits import ServerTraits
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.upstream.attempts import OnAttempt
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.credentials.base import Credential
from outrider.gateway.upstream.dialects.base import Dialect
from outrider.gateway.upstream.hedging import HedgeBudget
from outrider.gateway.upstream.latency import LatencyEstimate
from outrider.gateway.upstream.on_demand.model import OnDemandModel
from outrider.gateway.upstream.replicas import ReplicaSet

if TYPE_CHECKING:  # at run time it would import aiohttp, also where there are no upstream tiers
    from outrider.gateway.upstream.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """The dependencies of a tier."""

    transport: "Transport"
    dialect: Dialect
    replicas: ReplicaSet
    on_attempt: OnAttempt
    clock: Callable[[], float]
    """Gives seconds, as do the times in calls."""
    rng: random.Random
    redact: Callable[[bytes], Awaitable[bytes]] | None = None
    """Takes out of a request's body what the tier's servers may not get; None: nothing."""
    count_text: Callable[[str], int] | None = None
    """Counts the tokens of a text. None where the server's tokenizer is not known."""
    count_prompt: Callable[[UpstreamCall], int | None] | None = None
    """Counts the tokens of a call's prompt. None where the server's tokenizer is not known."""
    on_demand: OnDemandModel | None = None
    """The model that is to be loaded before a request is sent; None: the servers are others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """The state of one tier, for objects that live as long as one answer."""

    name: str
    settings: UpstreamSettings
    traits: ServerTraits
    parts: TierParts
    headers: Mapping[str, str] = field(repr=False)
    """Sent with every request."""
    credential: Credential = field(repr=False)
    first_token: LatencyEstimate
    """Learns from streamed answers."""
    total: LatencyEstimate
    """Learns from all complete answers."""
    whole: LatencyEstimate
    """Learns from answers that were not streamed."""
    hedges: HedgeBudget
