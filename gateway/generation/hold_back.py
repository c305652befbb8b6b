"""A small answer held back: the watch's decision, and the limit on holding it."""

from collections.abc import Callable
from dataclasses import replace

from engine.events import EngineEvent, PrefillDone, TokensEmitted
from router.cascade import CascadePlan, Judgement


class HoldBack:
    """Asks the watch of one choice (router/cascade.py) after each of the choice's events."""

    def __init__(self, plan: CascadePlan, clock: Callable[[], float]) -> None:
        self._watch = plan.new_watch()
        self._limit_s = plan.hold_back_s
        self._clock = clock
        self._since_s: float | None = None

    @property
    def held_s(self) -> float:
        """Seconds since the first token that could have been sent; 0 before it."""
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the watch must decide; None while there is no limit."""
        if self._limit_s is None or self._since_s is None:
            return None
        return max(self._since_s + self._limit_s - self._clock(), 0.0)

    def judge(self, event: EngineEvent, *, is_whole: bool) -> Judgement | None:
        """Return the decision after this event; None: hold on. `is_whole`: the answer has ended."""
        judgement = None
        match event:
            case PrefillDone():
                judgement = self._watch.on_prompt(event.hidden_state)
            case TokensEmitted():
                if self._since_s is None:
                    self._since_s = self._clock()
                judgement = self._watch.on_tokens([entry.logprob for entry in event.logprobs])
        if judgement is not None and judgement.action != "hold":
            return judgement
        return _decided(self._watch.on_end()) if is_whole else None

    def judge_at_limit(self) -> Judgement:
        """Return the decision at the end of the time limit."""
        return _decided(self._watch.on_time())

    def wants_continuation(self, event: TokensEmitted) -> Judgement | None:
        """Return why the large tier should go on from here, after a commit; None: it need not."""
        judgement = self._watch.on_tokens([entry.logprob for entry in event.logprobs])
        return judgement if judgement.action == "escalate" else None


def _decided(judgement: Judgement) -> Judgement:
    """Replace hold by commit: a watch that cannot decide when it must lets the answer stand."""
    return replace(judgement, action="commit") if judgement.action == "hold" else judgement
