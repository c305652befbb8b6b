"""The routing part of the wiring: `[routing]` and a router's folder in, a policy and parts out."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from outrider.engine.errors import EngineError
from outrider.engine.model.checkpoint_files import hub_commit
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.settings.routing import PriceSettings, RoutingSettings, TierPriceSettings
from outrider.gateway.settings.tree import Settings
from outrider.router.costs import TokenPrices, TypicalRequest
from outrider.router.encoder.bert import EncoderError
from outrider.router.loading import LoadedRouter, RoutingOptions, RoutingTargetError, load_router
from outrider.router.policy import RoutePolicy, WatchOptions, pair_complaint
from outrider.router.preference import PreferringPolicy
from outrider.router.scorer import RouterFileError
from outrider.verifier.params import TIERS, Tier

logger = logging.getLogger(__name__)


def build_routing(
    settings: Settings,
    models: Mapping[Tier, str],
    *,
    has_upstream_strong: bool = False,
    has_small_server: bool = False,
) -> tuple[RoutePolicy, RoutingParts]:
    """Return the policy for the models to load (tier to path or hub id), and its needs.

    `has_upstream_strong`: an upstream tier plays the large model's part, so that there is a choice
    for a small model alone too. `has_small_server`: one plays the small model's part. Raises
    EngineError for a router that cannot be read, cannot be set as configured, or belongs to other
    models.
    """
    options = settings.routing
    watch = WatchOptions(
        mode=options.cascade,
        hold_back_tokens=options.hold_back_tokens,
        hold_back_s=options.hold_back_ms / 1000,
        judge_whole=options.judge_whole,
        mid_stream=options.mid_stream,
    )
    prices = _prices(options.prices)
    typical = TypicalRequest()
    wanted = replace(_wanted(options, watch, prices), encoder=settings.models.encoder)
    path = settings.models.resolved_router()
    has_choice = has_small_server or (has_upstream_strong and "small" in models)
    tiers: tuple[Tier, ...] = TIERS if has_choice else tuple(models) or ("large",)
    try:
        loaded = load_router(path, tiers, wanted, typical)
    except RoutingTargetError as error:
        raise EngineError(f"{path}: {error}") from error
    except (RouterFileError, EncoderError, OSError) as error:
        raise EngineError(f"the router cannot be loaded: {error}") from error
    parts = RoutingParts(
        prices=prices,
        prefer=options.prefer,
        is_sticky=options.sticky,
        max_busy_factor=options.max_busy_factor,
        watch=watch,
        guard=loaded.guard,
        assured=loaded.assured,
        pair=_pair_to_check(loaded, models, is_forced=options.force_router),
        typical=typical,
        summary=loaded.summary,
    )
    policy = PreferringPolicy(
        policy=loaded.policy, min_quality=options.quality, is_assured=loaded.assured is not None
    )
    return policy, parts


def _wanted(
    options: RoutingSettings, watch: WatchOptions, prices: Mapping[Tier, TokenPrices] | None
) -> RoutingOptions:
    return RoutingOptions(
        strong_share=options.strong_share,
        quality=options.quality,
        max_cost_usd=options.max_cost_usd,
        threshold=options.threshold,
        band_low=options.band_low,
        band_high=options.band_high,
        autopilot=options.autopilot,
        explore_share=options.explore_share,
        abstains=options.abstain,
        watch=watch,
        prices=prices,
    )


def _prices(settings: PriceSettings) -> dict[Tier, TokenPrices] | None:
    """Return the settings' token prices; None where they name none."""

    def of(tier: TierPriceSettings) -> TokenPrices:
        return TokenPrices(
            prompt=tier.prompt, cached_prompt=tier.cached, completion=tier.completion
        )

    if not settings.is_known:
        return None
    return {"small": of(settings.small), "large": of(settings.large)}


def _pair_to_check(
    loaded: LoadedRouter, models: Mapping[Tier, str], *, is_forced: bool
) -> str | None:
    """Return the pair that the engine's models are compared with once they are loaded.

    Folders are compared here and now, before any weight is loaded; but not the hub's cache, into
    which the engine may still be fetching. Raises EngineError.
    """
    if loaded.pair is None:
        return None
    folders = {
        tier: Path(path).expanduser() for tier, path in models.items() if hub_commit(path) is None
    }
    known = {
        tier: checkpoint_fingerprint(folder) if folder.is_dir() else ""
        for tier, folder in folders.items()
    }
    complaint = pair_complaint(loaded.pair, known.get("small", ""), known.get("large", ""))
    if complaint is None:
        return None if is_forced else loaded.pair
    if not is_forced:
        raise EngineError(f"{complaint[0].upper()}{complaint[1:]}")
    logger.warning("router of another pair is used pair=%s reason=force_router", loaded.pair)
    return None
