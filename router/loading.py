"""A router's folder and what the operator wants of it: joined to a policy with its guard."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from outrider.router.assurance import LiveAssurance
from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.costs import TokenPrices, TypicalRequest
from outrider.router.dial import Dial, Setting
from outrider.router.encoder.reader import PromptReader
from outrider.router.encoder.sentence import encoder_for
from outrider.router.guard import Autopilot, GuardOutcome, RouteGuard
from outrider.router.label_free import AGREEMENT, EXPLORE_SHARE, AgreementModel, LabelFreePolicy
from outrider.router.policy import (
    RoutePolicy,
    TrainedPolicy,
    WatchOptions,
    WatchVerdict,
    fixed_policy,
    own_setting,
)
from outrider.router.scorer import RouterScorer
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

_PRICE_AGAIN_AFTER: Final = 64  # requests
WITHOUT_ROUTER: Final = (
    "without a router: the small model begins, and its first tokens decide, by a threshold learnt "
    "while serving (train a router: outrider router collect, then train)"
)


class RoutingTargetError(ValueError):
    """The router cannot be set to what is wanted of it. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """Options of the operator: `[routing]` of the settings.

    At most one of the first four is set; none: the router's calibration applies.
    """

    strong_share: float | None = None
    quality: float | None = None
    """Relative accuracy."""
    max_cost_usd: float | None = None
    """Mean of a request; needs `prices`."""
    threshold: float | None = None
    band_low: float | None = None
    """Replaces the calibrated band's lower end."""
    band_high: float | None = None
    """Replaces the calibrated band's upper end."""
    autopilot: bool = False
    explore_share: float = EXPLORE_SHARE
    """The share of kept answers without a router that the large model judges."""
    abstains: bool = True
    """Prompts that are unlike the router's training go to the policy without a router."""
    watch: WatchOptions = field(default_factory=WatchOptions)
    encoder: str | None = None
    """Where the router's sentence encoder is, if not where it was trained."""
    prices: Mapping[Tier, TokenPrices] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRouter:
    """A policy; for a trained router also its guard and its pair of models."""

    policy: RoutePolicy
    summary: str
    """Its task, in a few words, for the start's message."""
    guard: RouteGuard | None = None
    pair: str | None = None
    assured: LiveAssurance | None = None
    """Keeps a quality with a stated probability."""


def load_router(
    path: Path | None,
    tiers: Sequence[Tier],
    options: RoutingOptions,
    typical: TypicalRequest,
) -> LoadedRouter:
    """The policy for the loaded tiers.

    Raises ValueError if no tier is loaded, RouterFileError if the folder is not a router,
    EncoderError if its encoder is missing or another one, and RoutingTargetError if it cannot be
    set as wanted.
    """
    fixed = fixed_policy(path, tiers)
    if path is None and len(set(tiers)) > 1 and options.watch.mode != "off":
        return _without_router(options)
    if fixed is not None or path is None:
        assert fixed is not None
        if _has_target(options):
            logger.warning("the routing target has no effect reason=%s", fixed.why)
        return LoadedRouter(
            policy=fixed, summary=f"the {fixed.tier} model answers all: {fixed.why}"
        )
    scorer = RouterScorer.load(path)
    if scorer.tiers is not None:
        raise RoutingTargetError(
            f"this router knows {', '.join(scorer.tiers.names)}, and auto a small and a large "
            "model; set it as router of an alias with these models"
        )
    if options.autopilot and scorer.worth is not None:
        raise RoutingTargetError(
            "routing.autopilot keeps a share of the requests, and this router weighs gains by "
            f"{scorer.worth.model.unit}s; calibrate it with --gain-per request, or turn "
            "autopilot off"
        )
    dial = None if scorer.calibration is None else Dial(scorer.calibration)
    assured = LiveAssurance(scorer.assurances) if scorer.assurances else None
    start = _banded(_start(scorer, dial, options, typical, assured), options)
    autopilot = _autopilot(start(), dial, options) if options.autopilot else None
    current = start if autopilot is None else lambda: autopilot.setting
    guard = RouteGuard(
        current_setting=current,
        deciles=None if scorer.calibration is None else scorer.calibration.quality_deciles,
        autopilot=autopilot,
    )
    policy = TrainedPolicy(
        scorer=scorer,
        current_setting=current,
        dial=dial,
        watch=options.watch,
        reader=_reader(scorer, options),
        on_verdict=partial(_report_to, guard),
        otherwise=_abstaining(options) if options.abstains and scorer.familiarity else None,
        assured=assured,
        quality=options.quality,
    )
    summary = f"by the router in {path}"
    if policy.otherwise is not None:
        summary += "; prompts unlike its training: the small model's first tokens decide"
    return LoadedRouter(
        policy=policy, summary=summary, guard=guard, pair=scorer.pair, assured=assured
    )


def _reader(scorer: RouterScorer, options: RoutingOptions) -> PromptReader | None:
    """Return None for a router without an encoder; raises EncoderError."""
    if scorer.encoder is None:
        if options.encoder is not None:
            logger.warning("models.encoder has no effect reason=the router uses no encoder")
        return None
    stage = scorer.encoder
    return PromptReader(encoder_for(stage.config.id, options.encoder), stage.neighbours)


def _report_to(guard: RouteGuard, verdict: WatchVerdict) -> None:
    guard.saw(
        GuardOutcome(
            quality=verdict.quality,
            is_strong=verdict.is_escalated,
            confidence=verdict.confidence,
        )
    )


def _without_router(options: RoutingOptions) -> LoadedRouter:
    """A watch that learns its threshold while serving."""
    for name in ("max_cost_usd", "band_low", "band_high"):
        if getattr(options, name) is not None:
            logger.warning("routing.%s has no effect reason=no router", name)
    policy = replace(_label_free(options), why="no router", fixed_threshold=options.threshold)
    return LoadedRouter(policy=policy, summary=WITHOUT_ROUTER)


def _abstaining(options: RoutingOptions) -> LabelFreePolicy:
    """Make the policy for prompts unlike the router's training; its thresholds mean nothing."""
    return replace(_label_free(options), why="prompt unlike the router's training")


def _label_free(options: RoutingOptions) -> LabelFreePolicy:
    target = AGREEMENT if options.quality is None else options.quality
    return LabelFreePolicy(
        model=AgreementModel(target, options.strong_share),
        watch=options.watch,
        explore_share=options.explore_share,
    )


def _has_target(options: RoutingOptions) -> bool:
    targets = (options.strong_share, options.quality, options.max_cost_usd, options.threshold)
    return options.autopilot or any(target is not None for target in targets)


def _start(
    scorer: RouterScorer,
    dial: Dial | None,
    options: RoutingOptions,
    typical: TypicalRequest,
    assured: LiveAssurance | None,
) -> Callable[[], Setting]:
    """The setting as the targets want it; the one for a cost follows the requests' lengths."""
    if options.max_cost_usd is not None and options.prices is not None:
        return _CostTarget(_needed(dial, "max_cost_usd"), options, typical)
    if options.strong_share is not None and (dial is not None or not options.autopilot):
        setting = _needed(dial, "strong_share").at_share(options.strong_share)
    elif options.quality is not None and assured is not None:
        return partial(assured.setting, options.quality, may_watch=options.watch.mode != "off")
    elif options.quality is not None:
        setting = _needed(dial, "quality").at_quality(options.quality)
    else:
        setting = own_setting(scorer, options.threshold)
    return lambda: setting


def _banded(current: Callable[[], Setting], options: RoutingOptions) -> Callable[[], Setting]:
    """Return `current` with the operator's own band, whose shares were not measured."""
    low, high = options.band_low, options.band_high
    if low is None and high is None:
        return current

    def banded() -> Setting:
        setting = current()
        known = setting.band or (0.0, ALWAYS_LARGE)
        top = known[1] if high is None else high
        return Setting(
            threshold=setting.threshold, band=(min(known[0] if low is None else low, top), top)
        )

    return banded


def _needed(dial: Dial | None, target: str) -> Dial:
    if dial is None:
        raise RoutingTargetError(
            f"routing.{target} needs a router with a calibration table, and this one has labels "
            "only; `outrider router calibrate` makes one"
        )
    return dial


def _autopilot(start: Setting, dial: Dial | None, options: RoutingOptions) -> Autopilot:
    share = start.strong_share if options.strong_share is None else options.strong_share
    if share is None:
        raise RoutingTargetError(
            "routing.autopilot needs to know the large model's share: set routing.strong_share, or "
            "use a router with a calibration table"
        )
    return Autopilot(share, start, dial)


class _CostTarget:
    """The setting whose mean request costs at most the maximum, updated as requests change."""

    def __init__(self, dial: Dial, options: RoutingOptions, typical: TypicalRequest) -> None:
        assert options.prices is not None
        assert options.max_cost_usd is not None
        self._dial = dial
        self._prices = options.prices
        self._max_cost_usd = options.max_cost_usd
        self._hold_back_tokens = options.watch.hold_back_tokens
        self._typical = typical
        self._num_asked = 0
        self._setting = self._priced()

    def __call__(self) -> Setting:
        self._num_asked += 1
        if self._num_asked % _PRICE_AGAIN_AFTER == 0:
            self._setting = self._priced()
        return self._setting

    def _priced(self) -> Setting:
        small, large = (self._typical.cost_usd(self._prices[tier]) for tier in ("small", "large"))
        held = self._prices["small"].cost_usd(
            num_prompt_tokens=self._typical.num_prompt_tokens.value,
            num_completion_tokens=self._hold_back_tokens,
        )

        def mean_cost_usd(setting: Setting) -> float:
            share = setting.strong_share or 0.0
            # At worst every answer of the large model was begun by the small one.
            return (1.0 - share) * small + share * (large + (held if setting.band else 0.0))

        return self._dial.at_cost(self._max_cost_usd, mean_cost_usd)
