"""Chooses a tier for a prompt. A policy explains every decision in one short line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from outrider.router.assurance import LiveAssurance
from outrider.router.calibration import ALWAYS_LARGE, Stage
from outrider.router.dial import Dial, ScoreBand, Setting
from outrider.router.encoder.reader import PendingShares, PromptReader, once
from outrider.router.estimates import QualityEstimate
from outrider.router.scorer import RouterScorer
from outrider.router.watch import Stages, UntrainedAnswers, WatchedAnswer, WatchPlan, WatchRules
from outrider.router.words import Prefer, WatchMode
from outrider.router.worth import CostUnit, ExpectedCosts
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Destination of a request, and the reason."""

    tier: Tier
    reason: str
    """One ASCII line, fit for a header."""
    quality: float | None = None
    """Predicted quality of the small model's answer, in [0, 1]; None if not predicted."""
    threshold: float | None = None
    """What `quality` was compared with. Without a `band` the request went to the small tier when
    `quality` was not below it; a watch uses the same."""
    band: ScoreBand | None = None
    """Text qualities between which the small model begins under watch."""
    small_right: tuple[float, float] | None = None
    """An interval of the probability that the small model's answer is right, by the text; None
    where none is known."""
    stage: Stage | None = None
    """The last stage to decide."""
    watch: WatchPlan | None = None
    is_own: bool = False
    """The server's setting decided, not one of the request."""
    is_busy: bool = False
    """The large model's queue raised the bar."""
    expected: Mapping[CostUnit, ExpectedCosts] = field(default_factory=dict)
    """What the answers are expected to cost, where the router weighs costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What counts first for a request that two tiers may answer."""

    by: Prefer
    best: Tier = "small"
    """The tier that is expected to answer first, or that costs less; says nothing of quality."""
    figures: str = ""
    """What was compared; metrics count reasons without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConstraints:
    """A request's requirements on its route."""

    min_quality: float | None = None
    """The accuracy to keep, as a share of always-large's, in [0, 1]."""
    threshold: float | None = None
    """Replaces the server's own."""
    hold_back_tokens: int | None = None
    """Replaces the server's own."""
    hold_back_s: float | None = None
    """Replaces the server's own."""
    preference: Preference | None = None
    """None: the server's setting decides, or what else is required here."""
    is_whole: bool = False
    """The answer is not streamed, so the whole answer may be judged."""
    may_watch: bool = True
    """False if an answer cannot be held back or handed over."""
    current: Tier | None = None
    """The tier that has the conversation in its cache."""
    gain_factor: float = 1.0
    """What `current` multiplies the gain by that is required of the large model
    (router/costs.py)."""
    busy_factor: float = 1.0
    """The same for the wait before the large model begins. Requests that name a quality or a
    threshold get it all the same."""
    max_tokens: int | None = None
    """The longest answer that the request allows."""


NO_CONSTRAINTS = RouteConstraints()


class RouteConstraintError(ValueError):
    """Raised for requirements that cannot be evaluated; the message says why."""


class RoutePolicy(Protocol):
    """Chooses a tier from the text of a request. Must not block: the gateway calls it inline."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """Decide for one prompt, whatever its string. Raises RouteConstraintError only."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Every request goes to one tier; `why` says what leaves no choice."""

    tier: Tier
    why: str = "fixed"

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """Return the same route for every text; only the large tier is known to keep a quality."""
        del text
        if constraints.min_quality and self.tier == "small":
            raise RouteConstraintError(
                f"the quality of the small model is unknown (router: {self.why})"
            )
        return Route(tier=self.tier, reason=f"router: {self.why}, {self.tier} answers all")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options for watching small answers; `[routing]` in the settings has the same names."""

    mode: WatchMode = "auto"
    """auto follows the calibration, always watches every request for `auto`."""
    hold_back_tokens: int = 16
    hold_back_s: float | None = 0.25
    """Counts from the first token; None is no limit."""
    judge_whole: bool = True
    """Unstreamed answers are judged whole."""
    mid_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchVerdict:
    """Verdict on a watched answer: by the text, then by the watch."""

    quality: float
    confidence: float
    is_escalated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """A router's estimates, compared with a setting."""

    scorer: RouterScorer
    current_setting: Callable[[], Setting]
    """Called for every request, so that an autopilot may change it."""
    dial: Dial | None = None
    """The router's calibration; None for a router that has labels only."""
    watch: WatchOptions = field(default_factory=WatchOptions)
    reader: PromptReader | None = None
    """Of the router's encoder stage; None for a router without one."""
    on_verdict: Callable[[WatchVerdict], None] | None = None
    """Called with the watch's verdict on answers of requests without constraints of their own."""
    otherwise: RoutePolicy | None = None
    """Decides on prompts that are unlike the router's training. None: the router decides on them as
    well."""
    assured: LiveAssurance | None = None
    """Keeps a request's `min_quality`; None: as calibrated, for routers of earlier versions."""
    quality: float | None = None
    """The operator's target, which is assured to requests that cannot be watched as well."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """Estimate, compare, explain; abstain where the prompt is unlike the training."""
        familiar = None if self.otherwise is None else self.scorer.estimate_familiar(text)
        is_bound = constraints.min_quality is not None and self.assured is not None
        if is_bound and (why := self._why_unassured(familiar)):
            return Route(tier="large", reason=f"router: {why}, large keeps the quality")
        if familiar is None and self.otherwise is not None:
            may_watch = constraints.may_watch and self.watch.mode != "off"
            return self.otherwise.route(text, replace(constraints, may_watch=may_watch))
        estimate = familiar or self.scorer.estimate(text)
        setting = self._effective(constraints, estimate)
        route = self._route_by(text, estimate, setting, constraints)
        return replace(route, small_right=self._small_right(estimate))

    def _why_unassured(self, familiar: QualityEstimate | None) -> str:
        """Return why no quality is assured for a prompt; empty where it is."""
        if self.otherwise is not None and familiar is None:
            return "prompt unlike the router's training"
        if self.assured is not None and self.assured.current is None:
            return "nothing assured for the small model's weights"
        return ""

    def _small_right(self, estimate: QualityEstimate) -> tuple[float, float] | None:
        current = None if self.assured is None else self.assured.current
        if current is None:
            return None
        return current.stage(may_watch=False).small_right(estimate.small)

    def _route_by(
        self,
        text: str,
        estimate: QualityEstimate,
        setting: Setting,
        constraints: RouteConstraints,
    ) -> Route:
        quality = estimate.quality
        if setting.band is not None:
            read_prompt = once(self.reader, text)
            return self._route_by_band(estimate, setting, setting.band, constraints, read_prompt)
        sign, verdict = (
            (">=", "likely right") if quality >= setting.threshold else ("<", "too weak")
        )
        tier: Tier = "small" if quality >= setting.threshold else "large"
        figures = f"({quality:.2f} {sign} {setting.threshold:.2f})"
        return Route(
            tier=tier,
            reason=_reason(f"small model {verdict}", figures, tier, constraints),
            quality=quality,
            threshold=setting.threshold,
            stage="text",
            is_own=_is_own(constraints),
            is_busy=_is_busy(constraints),
            expected=self._expected(estimate, constraints),
        )

    def _expected(
        self, estimate: QualityEstimate, constraints: RouteConstraints
    ) -> Mapping[CostUnit, ExpectedCosts]:
        worth, tokens = self.scorer.worth, estimate.tokens
        if worth is None or tokens is None:
            return {}
        return worth.all_costs(
            tokens.at_most(constraints.max_tokens),
            hold_back_tokens=constraints.hold_back_tokens or self.watch.hold_back_tokens,
        )

    def _weight(self, constraints: RouteConstraints, estimate: QualityEstimate) -> float:
        """Return what the large model must gain, as a multiple of what the setting asks for."""
        weight = constraints.gain_factor
        if _is_busy(constraints):
            weight *= constraints.busy_factor
        if self.scorer.worth is not None and estimate.tokens is not None:
            weight *= self.scorer.worth.factor(estimate.tokens.at_most(constraints.max_tokens))
        return weight

    def _effective(self, constraints: RouteConstraints, estimate: QualityEstimate) -> Setting:
        """The setting for these constraints; its band says whether answers may be watched."""
        may_watch = constraints.may_watch and self.watch.mode != "off"
        least = constraints.min_quality
        if least is None and constraints.threshold is None and not may_watch:
            least = self.quality
        if least is not None and self.assured is not None:
            assured = self.assured.setting(least, may_watch=may_watch)
            # A conversation may need a larger gain to leave the small model: not at this price.
            factor = min(constraints.gain_factor, 1.0)
            return assured if factor == 1.0 else assured.for_gain_factor(factor)
        setting = self.current_setting()
        if constraints.threshold is not None:
            setting = own_setting(self.scorer, constraints.threshold)
        elif constraints.min_quality is not None:
            if self.dial is None:
                raise RouteConstraintError(
                    "the router has no calibration table; `outrider router calibrate` makes one"
                )
            setting = self.dial.at_quality(constraints.min_quality)
        if not may_watch:
            text_only = Setting(threshold=setting.threshold, strong_share=setting.strong_share)
            # Where costs are weighed, the deciles say nothing of shares: the bar stays as it is.
            by_share = None if self.scorer.worth is not None else self.dial
            setting = text_only if by_share is None else by_share.by_text(setting)
        elif self.watch.mode == "always" or (setting.band is None and self._stage == "prompt"):
            setting = Setting(
                threshold=setting.threshold,
                band=(0.0, ALWAYS_LARGE),
                strong_share=setting.strong_share if self._stage != "text" else None,
            )
        if constraints.gain_factor == 0.0 and constraints.current == "large":
            return Setting(threshold=ALWAYS_LARGE)
        weight = self._weight(constraints, estimate)
        return setting if weight == 1.0 else setting.for_gain_factor(weight)

    @property
    def _stage(self) -> Stage:
        return "text" if self.dial is None else self.dial.calibration.stage

    def _route_by_band(
        self,
        estimate: QualityEstimate,
        setting: Setting,
        band: ScoreBand,
        constraints: RouteConstraints,
        read_prompt: Callable[[], PendingShares],
    ) -> Route:
        quality = estimate.quality
        low, high = band
        tier: Tier = "small"
        plan = None
        if quality >= high:
            what, figures = "small model likely right", f"({quality:.2f} >= {high:.2f})"
        elif quality < low:
            tier = "large"
            what, figures = "small model too weak", f"({quality:.2f} < {low:.2f})"
        else:
            bound = f" < {high:.2f}" if high <= 1.0 else f" >= {low:.2f}"
            what, figures = "small model begins under watch", f"({quality:.2f}{bound})"
            plan = self._plan(estimate, setting, band, constraints, read_prompt)
        return Route(
            tier=tier,
            reason=_reason(what, figures, tier, constraints),
            quality=quality,
            threshold=setting.threshold,
            band=band,
            stage="text" if plan is None else self._last_stage,
            watch=plan,
            is_own=_is_own(constraints),
            is_busy=_is_busy(constraints),
            expected=self._expected(estimate, constraints),
        )

    @property
    def _last_stage(self) -> Literal["prompt", "answer"]:
        # Watched without calibration: what is written decides, by whatever stage there is.
        return "prompt" if self._stage == "prompt" else "answer"

    def _plan(
        self,
        estimate: QualityEstimate,
        setting: Setting,
        band: ScoreBand,
        constraints: RouteConstraints,
        read_prompt: Callable[[], PendingShares],
    ) -> WatchPlan:
        options = self.watch
        is_whole = constraints.is_whole and options.judge_whole
        rules = WatchRules(
            threshold=setting.threshold,
            sure=band,
            last_stage=self._last_stage,
            hold_back_tokens=constraints.hold_back_tokens or options.hold_back_tokens,
            is_whole=is_whole,
            goes_on=options.mid_stream,
        )
        stages: Stages = self.scorer
        if self.scorer.answer is None and self._last_stage == "answer":
            stages = UntrainedAnswers(self.scorer)
        tell = self.on_verdict if _is_own(constraints) else None

        def on_verdict(confidence: float, is_escalated: bool) -> None:
            if tell is not None:
                quality = estimate.quality
                tell(
                    WatchVerdict(quality=quality, confidence=confidence, is_escalated=is_escalated)
                )

        return WatchPlan(
            new_watch=lambda: WatchedAnswer(stages, rules, estimate, on_verdict, read_prompt()),
            hold_back_s=None if is_whole else constraints.hold_back_s or options.hold_back_s,
            hold_back_tokens=rules.hold_back_tokens,
            mid_stream=options.mid_stream,
            wants_hidden_state=self.scorer.probe is not None,
            read_prompt=read_prompt,
        )


def _is_own(constraints: RouteConstraints) -> bool:
    """Return whether the server's own setting decides, so that its calibration applies."""
    asked = (
        constraints.min_quality,
        constraints.threshold,
        constraints.hold_back_tokens,
        constraints.hold_back_s,
    )
    factors = (constraints.gain_factor, constraints.busy_factor)
    return asked == (None,) * 4 and constraints.may_watch and factors == (1.0, 1.0)


def _is_busy(constraints: RouteConstraints) -> bool:
    """Return whether a queue counts: there is one, and the request names no quality."""
    asked = (constraints.min_quality, constraints.threshold)
    return constraints.busy_factor != 1.0 and asked == (None, None)


def _reason(what: str, figures: str, tier: Tier, constraints: RouteConstraints) -> str:
    """Figures stand in parentheses at the end: metrics count reasons without them."""
    if constraints.gain_factor != 1.0 and constraints.current is not None:
        moves = "stays on" if constraints.current == tier else "moves to"
        what = f"conversation {moves} {tier}, {what}"
    if _is_busy(constraints):
        what = f"large model busy, {what}"
    return f"router: {what} {figures}"


def fixed_policy(path: Path | None, tiers: Sequence[Tier]) -> FixedPolicy | None:
    """The policy where there is no choice; raises ValueError if no tier is loaded."""
    if not tiers:
        raise ValueError("no tier is loaded: nothing to route to")
    if len(set(tiers)) == 1:
        return FixedPolicy(tiers[0], "one tier loaded")
    return FixedPolicy("large", "none configured") if path is None else None


def own_setting(scorer: RouterScorer, threshold: float | None = None) -> Setting:
    """Return the setting that the router was calibrated to, or the one with another threshold."""
    if scorer.calibration is None:
        return Setting(threshold=scorer.threshold if threshold is None else threshold)
    dial = Dial(scorer.calibration)
    return dial.chosen if threshold is None else dial.at_threshold(threshold)


def pair_complaint(trained_for: str | None, small: str, large: str) -> str | None:
    """Say that a router belongs to other models; None where it fits or that is unknown.

    `small` and `large`: fingerprints of the loaded checkpoints, empty where unknown.
    """
    loaded = f"{small}-{large}"
    if trained_for is None or not small or not large or trained_for == loaded:
        return None
    return (
        f"the router was trained for another pair of models ({trained_for}, loaded are "
        f"{loaded}), so its estimates do not apply to these. Train one with `outrider router "
        "collect` and `outrider router train`, or set routing.force_router = true to use it "
        "anyway."
    )
