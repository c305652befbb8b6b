"""One answer that two tiers have a part in, driven by hand, as cases of shared/turns.py."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from benchmarks.shared.turns import Turn
from outrider.engine.core import Engine
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Finished,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.router.watch import AnswerWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedTurn(Turn):
    """A turn with the tokens that the large tier took over from the small answer."""

    num_reused_tokens: int = 0


@dataclass(slots=True)
class Reader:
    """Events of one request and their times, in seconds of time.perf_counter."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden_state: tuple[float, ...] | None = None
    first_s: float | None = None
    last_s: float = 0.0
    is_held: bool = False
    stats: RequestStats | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more comes without a decision."""
        return self.is_held or self.stats is not None

    def take(self, events: Iterable[EngineEvent]) -> None:
        """Note events; those of other requests are passed over."""
        now_s = time.perf_counter()
        for event in events:
            if event.request_id != self.request_id:
                continue
            match event:
                case PrefillDone() if event.hidden_state is not None:
                    self.hidden_state = event.hidden_state
                case TokensEmitted():
                    self.token_ids += event.token_ids
                    self.logprobs += [entry.logprob for entry in event.logprobs]
                    self.first_s = self.first_s or now_s
                    self.last_s = now_s
                case AnswerHeld():
                    self.is_held = True
                case TierSwitched():
                    self.is_held = False
                    self.token_ids.clear()
                case Finished():
                    self.stats = event.stats
                case _:
                    pass


def watched(request: EngineRequest) -> EngineRequest:
    """A small-tier request as the gateway sends it where the answer may be escalated."""
    return replace(
        request,
        may_escalate=True,
        return_hidden_state=True,
        sampling=replace(request.sampling, num_logprobs=0),
    )


def plain(engine: Engine, request: EngineRequest) -> HandedTurn:
    """One answer of one tier; `wall_s` is the time to its first token."""
    started_s = time.perf_counter()
    reader = _begin(engine, request)
    _step_until(engine, reader, lambda: reader.has_ended)
    assert reader.first_s is not None
    return _turn(reader, reader.first_s - started_s, reader.last_s - reader.first_s)


def committed(engine: Engine, request: EngineRequest, watch: AnswerWatch) -> HandedTurn:
    """A watched answer that stays: `wall_s` is the time until its first token may be sent.

    `decode_s`: how long that token was held.
    """
    started_s = time.perf_counter()
    reader = _begin(engine, request)
    num_told = 0
    is_told = False
    action = "hold"
    while action == "hold":
        reader.take(engine.step(reader.take))
        if not is_told and reader.first_s is not None:
            is_told = True
            action = watch.on_prompt(reader.hidden_state).action
        if action == "hold" and len(reader.logprobs) > num_told:
            action = watch.on_tokens(reader.logprobs[num_told:]).action
            num_told = len(reader.logprobs)
        if action == "hold" and reader.is_held:
            action = watch.on_end().action
    assert action == "commit", "this watch was made to commit"
    assert reader.first_s is not None
    visible_s = time.perf_counter()
    engine.keep_on_tier(request.request_id)
    _step_until(engine, reader, lambda: reader.stats is not None)
    return _turn(reader, visible_s - started_s, visible_s - reader.first_s)


def escalated(engine: Engine, request: EngineRequest, after: int | None) -> HandedTurn:
    """Handed to the large tier after so many tokens, or None for the whole answer.

    `wall_s` is from submission to the last token, `decode_s` from the hand-over.
    """
    started_s = time.perf_counter()
    reader = _begin(engine, request)
    _step_until(engine, reader, lambda: reader.has_ended or _has(reader, after))
    switched_s = time.perf_counter()
    engine.switch_tier(request.request_id, "large")
    _step_until(engine, reader, lambda: reader.stats is not None)
    return _turn(reader, reader.last_s - started_s, reader.last_s - switched_s)


def restarted(engine: Engine, request: EngineRequest, after: int | None) -> HandedTurn:
    """As `escalated`, but the small answer is thrown away and the large tier asked afresh.

    It drafts with the small model, which finds its prompt in the prefix cache.
    """
    started_s = time.perf_counter()
    reader = _begin(engine, request)
    _step_until(engine, reader, lambda: reader.has_ended or _has(reader, after))
    switched_s = time.perf_counter()
    engine.abort(request.request_id)
    again = replace(
        request,
        request_id=f"{request.request_id}-again",
        tier="large",
        may_escalate=False,
        return_hidden_state=False,
        sampling=replace(request.sampling, num_logprobs=None),
    )
    reader = _begin(engine, again)
    _step_until(engine, reader, lambda: reader.stats is not None)
    return _turn(reader, reader.last_s - started_s, reader.last_s - switched_s)


def agreement(small: Sequence[int], large: Sequence[int]) -> float:
    """The share of the large answer's tokens that stand in the small one, in the same order."""
    if not large:
        return 1.0
    blocks = SequenceMatcher(None, list(small), list(large), autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(large)


def nearest(agreements: Sequence[float], wanted: float, number: int) -> list[int]:
    """`number` places whose mean is near `wanted`, nearest ones first; equal answers are left out.

    What comes out is as near as the data allow: say what the mean is.
    """
    places = [place for place, share in enumerate(agreements) if share < 1.0]
    chosen: list[int] = []
    while places and len(chosen) < number:
        total = sum(agreements[place] for place in chosen)

        def distance(place: int, total: float = total) -> float:
            mean = (total + agreements[place]) / (len(chosen) + 1)
            # Each should be near by itself; among those, the mean decides.
            return abs(agreements[place] - wanted) + abs(mean - wanted)

        best = min(places, key=distance)
        places.remove(best)
        chosen.append(best)
    return chosen


def _begin(engine: Engine, request: EngineRequest) -> Reader:
    engine.submit(request)
    return Reader(request.request_id)


def _has(reader: Reader, after: int | None) -> bool:
    return after is not None and len(reader.token_ids) >= after


def _step_until(engine: Engine, reader: Reader, is_done: Callable[[], bool]) -> None:
    while not is_done():
        reader.take(engine.step(reader.take))


def _turn(reader: Reader, wall_s: float, decode_s: float) -> HandedTurn:
    stats = reader.stats
    assert stats is not None
    return HandedTurn(
        token_ids=reader.token_ids,
        wall_s=wall_s,
        decode_s=decode_s,
        num_decoded_tokens=len(reader.token_ids),
        num_drafted_tokens=stats.num_drafted_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_passes=stats.num_steps,
        num_reused_tokens=stats.num_reused_tokens,
    )
