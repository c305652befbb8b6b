"""What the gateway is wired to: engine, tokenizers, router, tiers elsewhere, bounds of requests."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from engine.request import Tier
from gateway.backends.client import EngineClient
from gateway.edge.json_bounds import JsonBounds
from gateway.edge.metrics import EdgeMetrics
from gateway.experiments.experiments import Experiments
from gateway.metering.metrics import GatewayMetrics
from gateway.metering.tenancy import Tenancy
from gateway.planning.terms import Rules
from gateway.settings.http_bounds import HttpSettings
from gateway.slo.parts import SloParts
from gateway.telemetry.capture import NULL_CAPTURE, Capture
from gateway.telemetry.tracer import NULL_TRACER, Tracer
from gateway.tenants.principal import Principal
from gateway.text.chat import ChatTokenizer
from gateway.text.prompt_work import PromptSlots, PromptWork
from gateway.upstream.mirror import Mirror
from gateway.upstream.tier import UpstreamTier
from router.conversations import ConversationMemory
from router.costs import TokenPrices, TypicalRequest
from router.guard import RouteGuard
from router.policy import CascadeOptions, RoutePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds on what a request may ask for.

    `default_max_tokens` is used where a request sets none (or less, where the context ends sooner);
    None: all that the context leaves.
    """

    default_max_tokens: int | None = None
    max_body_bytes: int = 8 * 2**20
    max_prompt_chars: int = 1_000_000
    json_bounds: JsonBounds = field(default_factory=JsonBounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParts:
    """What choosing a tier needs beside the policy.

    prices: None where nobody named any. is_sticky: a conversation's prefix cache is weighed in.
    cascade: for people, the policy knows its own. pair: fingerprints of the models that the router
    was trained for, to be compared with the engine's; None where there is nothing to compare.
    """

    prices: Mapping[Tier, TokenPrices] | None = None
    is_sticky: bool = True
    cascade: CascadeOptions = field(default_factory=CascadeOptions)
    guard: RouteGuard | None = None
    pair: str | None = None
    typical: TypicalRequest = field(default_factory=TypicalRequest)
    memory: ConversationMemory = field(default_factory=ConversationMemory)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudParts:
    """The tiers that are servers elsewhere, in the order of the settings, and when they answer.

    `gateway_id` tells a request that has come through this gateway before. `secrets`: what is sent
    to servers and is not for clients.
    """

    tiers: Mapping[str, UpstreamTier] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    mirror: Mirror | None = None
    secrets: Collection[str] = field(default=(), repr=False)
    gateway_id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """Everything the gateway is wired to.

    `clock` is the machine's monotonic clock, `wall_clock` the seconds since 1970.
    """

    engine: EngineClient
    tokenizers: Mapping[Tier, ChatTokenizer]
    router: RoutePolicy
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    routing: RoutingParts = field(default_factory=RoutingParts)
    cloud: CloudParts = field(default_factory=CloudParts)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    tenancy: Tenancy = field(default_factory=Tenancy)
    http: HttpSettings = field(default_factory=HttpSettings)
    edge_metrics: EdgeMetrics | None = None
    experiments: Experiments = field(default_factory=Experiments)
    slo: SloParts = field(default_factory=SloParts)
    tracer: Tracer = NULL_TRACER
    capture: Capture = NULL_CAPTURE
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    prompt_slots: PromptSlots = field(default_factory=PromptSlots)

    def prompt_work(self, principal: Principal) -> PromptWork:
        """How prompts of this tenant's requests are built."""
        return PromptWork(
            slots=self.prompt_slots,
            tenant=principal.tenant,
            max_chars=self.limits.max_prompt_chars,
        )
