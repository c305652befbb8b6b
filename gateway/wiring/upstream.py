"""The part of the wiring for upstream tiers: `[tiers.NAME]` and `[mirror]` in, tiers out."""

import random
import secrets
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outrider.engine.errors import EngineError
from outrider.gateway.answering.reading.placement_policy import PlacementPolicy
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.answering.text.token_counts import TokenCounter
from outrider.gateway.settings.server_traits import TRAITS
from outrider.gateway.settings.tiers import MirrorSettings, UpstreamSettings
from outrider.gateway.settings.tree import Settings, SettingsError, is_missing_folder
from outrider.gateway.upstream.addresses import check_url
from outrider.gateway.upstream.attempts import OnAttempt
from outrider.gateway.upstream.dialects import dialect_for
from outrider.gateway.upstream.mirror import Mirror
from outrider.gateway.upstream.on_demand.pool import ModelPool
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.small_server import SmallServer
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.gateway.upstream.tier_parts import TierParts
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring.checkpoints import checkpoint
from outrider.gateway.wiring.checks import build_redaction
from outrider.gateway.wiring.credentials import LiveSecrets, build_credential, credential_complaints
from outrider.gateway.wiring.on_demand import build_pool, needs_of, on_demand_complaints
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.gateway.upstream.transport import Transport

_MIN_SECRET_CHARS: Final = 8
_PROCESS_KEY: Final = "the key of a model's process"
"""Stands in the place of an environment variable's name."""


def check_upstreams(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise SettingsError for all mistakes that keep upstream tiers from working, together.

    Keys, certificates, private addresses, folders. No server is contacted and no name looked up.
    """
    lines = [
        line
        for name, tier in settings.tiers.items()
        for line in tier_complaints(
            name, tier, environ, allow_private=settings.allow_private_upstreams
        )
    ]
    lines += _mirror_complaints(settings.mirror)
    lines += on_demand_complaints(settings)
    if lines:
        raise SettingsError("\n".join(lines))


def build_upstreams(
    settings: Settings,
    environ: Mapping[str, str],
    on_attempt: OnAttempt,
    *,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
    pool: ModelPool | None = None,
) -> dict[str, UpstreamTier]:
    """Return the upstream tiers by name, in the settings' order, without starting them.

    `pool`: gets the models on demand; None where they are not to be loaded. Keys are read from
    `environ`. Blocks while tokenizers are read, or fetched from the hub. Raises SettingsError.
    """
    check_upstreams(settings, environ)
    rng = rng or random.Random()
    redact = build_redaction(settings)
    tiers: dict[str, UpstreamTier] = {}
    for name, options in settings.tiers.items():
        if options.unknown_fields is None:
            options = options.model_copy(update={"unknown_fields": settings.unknown_fields})
        model = options.model_on_demand
        if model is not None:
            options = options.model_copy(update={"model": name})
        allow_private = settings.allow_private_upstreams or model is not None
        parts = _tier_parts(
            name, options, on_attempt, clock=clock, rng=rng, allow_private=allow_private
        )
        variables = environ
        if model is not None and pool is not None:
            needs = needs_of(settings, name, model)
            parts = replace(parts, on_demand=pool.add(name, needs, parts.replicas))
            options = options.model_copy(update={"api_key_env": _PROCESS_KEY})
            variables = {_PROCESS_KEY: needs.recipe.key}
        credential = build_credential(name, options, parts.dialect, variables, clock)
        parts = replace(parts, redact=None if options.local else redact)
        tiers[name] = UpstreamTier(name, options, parts, credential)
    return tiers


def _tier_parts(
    name: str,
    options: UpstreamSettings,
    on_attempt: OnAttempt,
    *,
    clock: Callable[[], float],
    rng: random.Random,
    allow_private: bool,
) -> TierParts:
    """Return the parts of a tier; one with a model on demand has no server yet."""
    traits = TRAITS[options.server]
    counter = _token_counter(name, options)
    return TierParts(
        transport=build_transport(name, options, allow_private=allow_private, clock=clock),
        dialect=dialect_for(traits.dialect, name),
        replicas=ReplicaSet(
            options.url if options.model_on_demand is None else (),
            clock=clock,
            rng=rng,
            has_prefix_cache=traits.has_prefix_cache,
        ),
        on_attempt=on_attempt,
        clock=clock,
        rng=rng,
        count_text=None if counter is None else counter.count_text,
        count_prompt=None if counter is None else counter.count_prompt,
    )


def build_upstream(
    settings: Settings,
    environ: Mapping[str, str],
    local: Collection[Tier],
    metrics: UpstreamMetrics,
) -> UpstreamParts:
    """Build all parts for upstream tiers, beside the `local` tiers that are loaded.

    Raises SettingsError, as `build_upstreams` does.
    """
    try:
        rules = PlacementPolicy.of(
            settings.handoff,
            # What takes hand-offs unless another is named is better there already.
            tiers=sorted(settings.tiers, key=settings.models_on_demand.__contains__),
            local=local,
            on_device=[name for name, tier in settings.tiers.items() if tier.local],
        )
    except ValueError as error:
        raise SettingsError(str(error)) from None
    pool = build_pool(settings)
    tiers = build_upstreams(settings, environ, metrics.on_attempt, pool=pool)
    metrics.observe(tiers, {} if pool is None else pool.models)
    gateway_id = secrets.token_hex(8)
    small = None
    if rules.small is not None:
        small = SmallServer(
            tiers[rules.small],
            gateway_id=gateway_id,
            clock=time.monotonic,
            on_untrusted=metrics.untrusted,
        )
    return UpstreamParts(
        small=small,
        gateway_id=gateway_id,
        tiers=tiers,
        pool=pool,
        rules=rules,
        mirror=build_mirror(settings, tiers, metrics),
        secrets=LiveSecrets(
            _header_secrets(settings), [tier.credential for tier in tiers.values()]
        ),
        metrics=metrics,
    )


def _header_secrets(settings: Settings) -> frozenset[str]:
    """Return extra headers' values; not those that are too short to be secret."""
    told = [value for options in settings.tiers.values() for value in options.headers.values()]
    words = [word for value in told for word in (value, value.rpartition(" ")[2])]
    return frozenset(word for word in words if len(word) >= _MIN_SECRET_CHARS)


def build_mirror(
    settings: Settings,
    tiers: Mapping[str, UpstreamTier],
    metrics: UpstreamMetrics,
    *,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> Mirror | None:
    """Return the mirror of requests; None where none are to be copied."""
    options = settings.mirror
    if options.tier is None or options.share == 0:
        return None
    return Mirror(
        tiers[options.tier],
        options,
        metrics=metrics,
        clock=clock,
        rng=rng or random.Random(),
    )


def build_transport(
    name: str,
    options: UpstreamSettings,
    *,
    allow_private: bool,
    clock: Callable[[], float] = time.monotonic,
) -> "Transport":
    """Build the HTTP transport to a tier's servers from its settings."""
    from outrider.gateway.upstream.transport import Transport  # aiohttp: 0.2 s of the start

    return Transport(
        tier=name,
        timeouts=options.timeouts,
        max_connections=options.max_connections,
        allow_private=allow_private,
        ca_file=options.ca_file,
        clock=clock,
    )


def tier_complaints(
    name: str, options: UpstreamSettings, environ: Mapping[str, str], *, allow_private: bool
) -> Iterator[str]:
    """Return the settings that keep a tier unusable, a line for each. No server is contacted."""
    where = f"tiers.{name}"
    yield from credential_complaints(name, options, environ)
    if complaint := _certificate_complaint(options):
        yield f"{where}.ca_file = {str(options.ca_file)!r}: {complaint}"
    for url in options.url if options.model_on_demand is None else ():
        try:
            check_url(url, allow_private=allow_private)
        except ValueError as error:
            yield f"{where}.url: {error}"
    if options.tokenizer is not None and is_missing_folder(options.tokenizer):
        yield f"{where}.tokenizer = {options.tokenizer!r}: no such folder"


def _certificate_complaint(options: UpstreamSettings) -> str | None:
    """Return the problem with a tier's certificate file; None where it is valid or not named."""
    if options.ca_file is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=options.ca_file)
    except ssl.SSLError:
        return "it has no certificates in PEM format"
    except OSError as error:
        return f"it cannot be read: {(error.strerror or str(error)).lower()}"
    return None


def _mirror_complaints(options: MirrorSettings) -> Iterator[str]:
    if options.file is None:
        return
    path = options.file.expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        yield f"mirror.file = {str(options.file)!r}: name a file in a folder that exists"


def _token_counter(name: str, options: UpstreamSettings) -> TokenCounter | None:
    """Return a counter with the tier's own tokenizer; None where that is unknown."""
    if options.tokenizer is None:
        return None
    try:
        return TokenCounter.load(checkpoint(options.tokenizer, options.tokenizer_revision))
    except (EngineError, OSError, ValueError) as error:
        raise SettingsError(
            f"tiers.{name}.tokenizer = {options.tokenizer!r}: it cannot be loaded: {error}"
        ) from error
