"""The shared dependencies of one upstream tier's parts."""

import random
from collections.abc import Callable, Mapping
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
from outrider.gateway.upstream.replicas import ReplicaSet

if TYPE_CHECKING:  # at run time it would import aiohttp, also where there are no upstream tiers
    from outrider.gateway.upstream.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """The dependencies of a tier. `clock` gives seconds, as do the times in calls.

    `count_text` counts the tokens of a text, `count_prompt` those of a call's prompt; None where
    the server's tokenizer is not known.
    """

    transport: "Transport"
    dialect: Dialect
    replicas: ReplicaSet
    on_attempt: OnAttempt
    clock: Callable[[], float]
    rng: random.Random
    count_text: Callable[[str], int] | None = None
    count_prompt: Callable[[UpstreamCall], int | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """The state of one tier, for objects that live as long as one answer.

    `headers` go with every request. `first_token` learns from streamed answers, `total` from all
    complete ones, `whole` from those that were not streamed.
    """

    name: str
    settings: UpstreamSettings
    traits: ServerTraits
    parts: TierParts
    headers: Mapping[str, str] = field(repr=False)
    credential: Credential = field(repr=False)
    first_token: LatencyEstimate
    total: LatencyEstimate
    whole: LatencyEstimate
    hedges: HedgeBudget
