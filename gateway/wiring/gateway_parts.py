"""The parts that a gateway is wired from, as the settings configure them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.gateway.answering.caching.answers import CacheRules
from outrider.gateway.answering.caching.entry import CacheStore
from outrider.gateway.answering.jobs.prompt_heads import PromptHeads
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.prompt_work import PromptSlots
from outrider.gateway.contract.schema.kinds import ReasoningField, UnknownFields
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.experiments.slo.slo_parts import SloParts
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.http.apis.responses.store import ResponseStore
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.receipts.signing_keys import SigningKeys
from outrider.gateway.settings.adapters import AdapterSettings
from outrider.gateway.settings.alerts import AlertSettings
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.sign_in import SignInSettings
from outrider.gateway.telemetry.capture import NULL_CAPTURE, Capture
from outrider.gateway.telemetry.tracer import NULL_TRACER, Tracer
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.workers.siblings import Siblings
from outrider.router.policy import RoutePolicy
from outrider.router.tier_policy import TierPolicy
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.gateway.checks.checks import Checks
    from outrider.gateway.telemetry.otlp_metrics import MetricsPush


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParts:
    """The response cache's store, and its rules."""

    store: CacheStore | None = None
    """None without a response cache."""
    rules: CacheRules = field(default_factory=CacheRules)
    settings_digest: bytes = b""
    """Bytes that change with the settings that shape answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """All parts of one gateway. Only the wiring has them all; each class gets those it needs."""

    engine: EngineClient
    tokenizers: Mapping[Tier, ChatTokenizer]
    router: RoutePolicy
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values of a request's sampling fields where it sets none, by field."""
    routing: RoutingParts = field(default_factory=RoutingParts)
    prompt_heads: PromptHeads = field(default_factory=PromptHeads)
    upstream: UpstreamParts = field(default_factory=UpstreamParts)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    tenancy: Tenancy = field(default_factory=Tenancy)
    http: HttpSettings = field(default_factory=HttpSettings)
    edge_metrics: EdgeMetrics | None = None
    experiments: Experiments = field(default_factory=Experiments)
    slo: SloParts = field(default_factory=SloParts)
    tracer: Tracer = NULL_TRACER
    push: "MetricsPush | None" = None
    capture: Capture = NULL_CAPTURE
    wall_clock: Callable[[], float] = time.time
    """Seconds since 1970."""
    clock: Callable[[], float] = time.monotonic
    """The machine's monotonic clock."""
    aliases: Mapping[str, AliasSettings] = field(default_factory=dict)
    alias_policies: Mapping[str, TierPolicy] = field(default_factory=dict)
    """The routers of aliases that have one."""
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    unknown_fields: UnknownFields = "refuse"
    reasoning_field: ReasoningField = "reasoning_content"
    cache: CacheParts = field(default_factory=CacheParts)
    sign_in: SignInSettings = field(default_factory=SignInSettings)
    checks: "Checks | None" = None
    """None where no check asks a hook."""
    responses: ResponseStore | None = None
    """None where responses are not stored."""
    batches: BatchStore | None = None
    """None where files and batches are not kept."""
    prompt_slots: PromptSlots = field(default_factory=PromptSlots)
    signing_keys: SigningKeys = field(default_factory=lambda: SigningKeys(None))
    """They sign receipts."""
    siblings: Siblings | None = None
    """The other processes of this gateway; None where it has one."""
