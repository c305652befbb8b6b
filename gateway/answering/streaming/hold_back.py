"""A small answer held back: the watch's decision, and the limit on holding it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from outrider.engine.events import EngineEvent, PrefillDone, TokensEmitted
from outrider.router.watch import Judgement, WatchPlan

_MOST_READING_S: Final = 0.25


class HoldBack:
    """Asks the watch of one choice (router/watch.py) after each of the choice's events."""

    def __init__(self, plan: WatchPlan, clock: Callable[[], float]) -> None:
        self._watch = plan.new_watch()
        self._reading = None if plan.read_prompt is None else plan.read_prompt()
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

    async def until_read(self) -> None:
        """Wait until the watch has all that it wants to know of the prompt, or for too long.

        The small model goes on meanwhile. In most cases it is slower, and nothing is waited for.
        """
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([asyncio.wrap_future(self._reading)], timeout=_MOST_READING_S)

    def judge(self, event: EngineEvent, *, is_whole: bool) -> Judgement | None:
        """Return the decision after this event; None: hold on. `is_whole`: the answer has ended."""
        match event:
            case PrefillDone():
                judgement = self.judge_prompt(event.hidden_state)
            case TokensEmitted():
                judgement = self.judge_tokens([entry.logprob for entry in event.logprobs])
            case _:
                judgement = None
        return self.judge_end() if judgement is None and is_whole else judgement

    def judge_prompt(self, hidden_state: Sequence[float] | None = None) -> Judgement | None:
        """Return the decision once the prompt is read; `hidden_state` as far as it is known."""
        return _final(self._watch.on_prompt(hidden_state))

    def judge_tokens(self, logprobs: Sequence[float]) -> Judgement | None:
        """Return the decision after further tokens, which could be sent now."""
        if self._since_s is None:
            self._since_s = self._clock()
        return _final(self._watch.on_tokens(logprobs))

    def judge_end(self) -> Judgement:
        """Return the decision on the whole answer."""
        return _decided(self._watch.on_end())

    def judge_at_limit(self) -> Judgement:
        """Return the decision at the end of the time limit."""
        return _decided(self._watch.on_time())

    def wants_continuation(self, event: TokensEmitted) -> Judgement | None:
        """Return why the large tier should go on from here, after a commit; None: it need not."""
        judgement = self._watch.on_tokens([entry.logprob for entry in event.logprobs])
        return judgement if judgement.action == "escalate" else None


def _final(judgement: Judgement) -> Judgement | None:
    return None if judgement.action == "hold" else judgement


def _decided(judgement: Judgement) -> Judgement:
    """Replace hold by commit: a watch that cannot decide when it must lets the answer stand."""
    return replace(judgement, action="commit") if judgement.action == "hold" else judgement
