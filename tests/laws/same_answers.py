"""One way to say it: these requests get the same answers, whatever varies.

    assert_same_answers(mixed_requests(), vary=ON_DEVICE | few_blocks(mixed_requests()))
    assert_same_answers(requests, of=shipped_pair(), vary=WARM, within=logprobs(1e-4))

A law names requests, the way in which they are served (`Way`), and how near the answers must be.
The right answers are those of plain decoding (`PLAIN`), unless the law compares with another way
(`like`) or has them from a definition (`right`). Ways are joined by `|`. A way also says what must
have happened in it (`shows`): a law of pre-emption in which nothing was pre-empted fails.
"""

import copy
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from outrider.engine.core import Engine
from outrider.engine.request import NO_OBJECTIVE, EngineRequest, SpeculationParams
from tests.engines import (
    Answer,
    Pair,
    assert_idle,
    make_engine,
    serve,
    step_once,
    texts,
    tiny_pair,
)
from tests.heads import make_head_engine

# ---- what varies ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to serve requests, one axis a field; what is not given is as usual."""

    # Arguments of `make`: who guesses, how many blocks there are, what a step may hold, ...
    engine: Mapping[str, Any] = field(default_factory=dict)
    # Makes the engine of a pair of models: with a small model, a head, a model in parts, ...
    make: Callable[..., Engine] = make_engine
    # False: the requests ask for no guesses, whatever the engine could do.
    guesses: bool = True
    # So many requests are served at a time, one engine for all. None: all of them together.
    at_a_time: int | None = None
    # The step before which the request with this number joins the others.
    arrive: Callable[[int], int] | None = None
    # Small passes give their tokens at once, not at the step's end.
    streams: bool = False
    # All are served so many times by one engine: from the second time on its caches are warm.
    turns: int = 1
    # Behind how many tokens the request with this number, whose answer has a length, is resumed.
    resume: Callable[[int, int], int] | None = None
    # Behind how many tokens, or at its end, the small answer with this number goes to the large
    # tier, which keeps its tokens or answers anew.
    escalate: Callable[[int], int] | None = None
    keeps_answer: bool = False
    # Gets the engine before its first request; what it returns is `Served.watched`.
    watch: Callable[[Engine], Any] | None = None
    # Numbers of `RequestStats` that are not 0 in all, or the law would say nothing.
    shows: tuple[str, ...] = ()

    def __or__(self, other: "Way") -> "Way":
        """Join two ways: what the other one gives goes first."""
        usual = Way()
        given = {
            each.name: getattr(other, each.name)
            for each in fields(Way)
            if getattr(other, each.name) != getattr(usual, each.name)
        }
        both = {"engine": {**self.engine, **other.engine}, "shows": (*self.shows, *other.shows)}
        return replace(self, **given | both)


def by(**engine: Any) -> Way:
    """An engine that is made with these arguments of `make_engine`."""
    return Way(engine=engine)


def with_head(**engine: Any) -> Way:
    """An engine whose drafter is a head: arguments of `make_head_engine`."""
    return Way(engine=engine, make=make_head_engine)


def few_blocks(requests: SequenceOf[EngineRequest], *, spare: int = 0, **engine: Any) -> Way:
    """Blocks of 4 tokens for the longest request and few more: others are pre-empted."""
    longest = max(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
    return Way(
        engine={"block_size": 4, "large_blocks": -(-longest // 4) + spare, **engine},
        shows=("num_preemptions",),
    )


AS_USUAL: Final = Way()
ACCEPTING: Final = Way(shows=("num_accepted_tokens",))
"""Guesses are made, and some of them are right."""
UNDRAFTED: Final = Way(guesses=False)
ALONE: Final = Way(at_a_time=1)
COLD: Final = by(prefix_caching=False)
WARM: Final = Way(turns=2, shows=("num_cached_tokens",))
"""The second time every prompt is in the caches."""
ON_DEVICE: Final = by(on_device=True)
"""Trees grow without the host."""
PLAIN: Final = by(speculates=False) | COLD | ALONE | UNDRAFTED
"""Token by token, nothing beside it, nothing found in a cache."""


# ---- serving ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine after the last request's end, and the answers of each turn."""

    engine: Engine
    turns: list[dict[str, Answer]]
    watched: Any = None

    @property
    def answers(self) -> dict[str, Answer]:
        """Those of the last turn."""
        return self.turns[-1]

    def total(self, name: str) -> int:
        """The last turn's sum of a number of `RequestStats`."""
        return total(self.answers, name)


def total(answers: Mapping[str, Answer], name: str) -> int:
    """The sum of a number of `RequestStats` over all answers."""
    return sum(getattr(answer.stats, name) for answer in answers.values())


def undrafted(requests: SequenceOf[EngineRequest]) -> list[EngineRequest]:
    """The same requests; they ask for no guesses."""
    return [replace(each, speculation=SpeculationParams(enabled=False)) for each in requests]


def serve_in(way: Way, requests: SequenceOf[EngineRequest], of: Pair | None = None) -> Served:
    """Serve requests in a way, by the tiny pair unless another one is given."""
    engine = way.make(of or tiny_pair(), **way.engine)
    watched = way.watch(engine) if way.watch is not None else None
    requests = requests if way.guesses else undrafted(requests)
    turns = [_turn(engine, way, requests) for _ in range(way.turns)]
    return Served(engine=engine, turns=turns, watched=watched)


def _turn(engine: Engine, way: Way, requests: SequenceOf[EngineRequest]) -> dict[str, Answer]:
    if way.escalate is not None:
        positions = {each.request_id: way.escalate(n) for n, each in enumerate(requests)}
        return serve_escalating(engine, requests, positions, keeps_answer=way.keeps_answer)
    arrivals = {each.request_id: way.arrive(n) for n, each in enumerate(requests) if way.arrive}
    size = way.at_a_time or len(requests)
    answers: dict[str, Answer] = {}
    for start in range(0, len(requests), size):
        together = requests[start : start + size]
        answers |= serve(engine, together, arrivals=arrivals, streams=way.streams)
    return answers


def serve_escalating(
    engine: Engine,
    requests: SequenceOf[EngineRequest],
    positions: Mapping[str, int],
    *,
    keeps_answer: bool = False,
) -> dict[str, Answer]:
    """Serve, and hand over each request of `positions` that has so many tokens, or is held."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.submit(request)
    while not all(answer.finished for answer in answers.values()):
        for name, position in positions.items():
            answer = answers[name]
            is_due = len(answer.token_ids) >= position or answer.held is not None
            if is_due and not answer.switches and answer.finished is None:
                engine.switch_tier(name, "large", keeps_answer=keeps_answer)
        assert engine.has_work, "a request is neither held nor at work"
        step_once(engine, answers)
    return answers


def resumed(
    requests: SequenceOf[EngineRequest],
    right: Mapping[str, Answer],
    place: Callable[[int, int], int],
) -> list[EngineRequest]:
    """The same requests, of whose answers the client has the beginnings already."""
    heads = [right[each.request_id].token_ids for each in requests]
    return [
        replace(each, resumed_token_ids=tuple(head[: place(n, len(head))]))
        for n, (each, head) in enumerate(zip(requests, heads, strict=True))
    ]


# ---- what is right ------------------------------------------------------------------------------

Right = Mapping[str, Answer] | Mapping[str, list[int]]

# What only drafters and queues read: the plain answer is computed once for all of its values.
_NO_MATTER: Final[dict[str, Any]] = {
    "request_id": "plain",
    "speculation": SpeculationParams(enabled=False),
    "prediction_token_ids": (),
    "retracted_token_ids": (),
    "group_id": None,
    "tenant": "",
    "arrival_s": None,
    "objective": NO_OBJECTIVE,
    "may_escalate": False,
}


_KNOWN: Final[dict[tuple[Pair, EngineRequest], Answer]] = {}


def plain_answers(
    of: Pair, requests: SequenceOf[EngineRequest], **changes: Any
) -> dict[str, Answer]:
    """What plain decoding says to each request, alone; `changes`: fields that all of them get."""
    asked = {each.request_id: replace(each, **_NO_MATTER | changes) for each in requests}
    new = [each for each in dict.fromkeys(asked.values()) if (of, each) not in _KNOWN]
    if new:
        named = [replace(each, request_id=str(n)) for n, each in enumerate(new)]
        answers = serve_in(_plain_way(new), named, of).answers
        _KNOWN.update(((of, each), answers[str(n)]) for n, each in enumerate(new))
    return {name: _KNOWN[of, each] for name, each in asked.items()}


def _plain_way(requests: SequenceOf[EngineRequest]) -> Way:
    """The plain way; grammars are of the bundled pair."""
    if not any(each.grammar for each in requests):
        return PLAIN
    from tests.grammars import shipped_compiler  # a GPU machine may lack llguidance

    return PLAIN | by(grammars={"large": shipped_compiler(), "small": shipped_compiler()})


def plainly(of: Pair, requests: SequenceOf[EngineRequest]) -> dict[str, list[int]]:
    """The tokens of the plain answers."""
    return {name: [*each] for name, each in texts(plain_answers(of, requests)).items()}


# ---- how near -----------------------------------------------------------------------------------

Compare = Callable[[str, Answer, Answer], None]
"""Gets a request's name, its answer and the right one; raises AssertionError."""


def tokens(name: str, answer: Answer, right: Answer) -> None:
    """Equal tokens."""
    assert answer.token_ids == right.token_ids, name


def exactly(name: str, answer: Answer, right: Answer) -> None:
    """Equal tokens and reasons to end, and log-probabilities with equal bits."""
    tokens(name, answer, right)
    assert answer.logprobs == right.logprobs, name
    assert answer.finish_reason == right.finish_reason, name


def logprobs(bound: float) -> Compare:
    """Equal tokens and reasons to end; log-probabilities that differ by less than this."""

    def compare(name: str, answer: Answer, right: Answer) -> None:
        tokens(name, answer, right)
        assert answer.finish_reason == right.finish_reason, name
        assert [each.token_id for each in answer.logprobs] == [
            each.token_id for each in right.logprobs
        ]
        for ours, theirs in zip(answer.logprobs, right.logprobs, strict=True):
            pairs = zip((ours.logprob, *_best(ours)), (theirs.logprob, *_best(theirs)), strict=True)
            assert all(abs(one - other) < bound for one, other in pairs), (name, ours, theirs)

    return compare


def _best(entry: Any) -> list[float]:
    return [number for _, number in entry.top]


# ---- the law ------------------------------------------------------------------------------------


def assert_same_answers(
    requests: SequenceOf[EngineRequest],
    *,
    vary: Way = AS_USUAL,
    of: Pair | None = None,
    like: Way = PLAIN,
    right: Right | None = None,
    within: Compare = tokens,
) -> Served:
    """Serve requests in a way; their answers are as right as `within` says, in every turn.

    of: the models, the tiny pair by default. like: the way whose answers are right. right: the
    answers themselves, where something else gives them. Afterwards the engine holds nothing.
    """
    of = of or tiny_pair()
    wanted = _wanted(requests, vary, of, like, right)
    asked = requests if vary.resume is None else resumed(requests, wanted, vary.resume)
    served = serve_in(vary, asked, of)
    assert_idle(served.engine)
    for answers in served.turns:
        for request in asked:
            answer, whole = answers[request.request_id], wanted[request.request_id]
            within(request.request_id, answer, _behind(whole, len(request.resumed_token_ids or ())))
            assert answer.stats.num_output_tokens == len(whole.token_ids)
    _assert_shown(vary, served)
    return served


def _wanted(
    requests: SequenceOf[EngineRequest], vary: Way, of: Pair, like: Way, right: Right | None
) -> dict[str, Answer]:
    if right is not None:
        return {
            name: Answer(token_ids=each) if isinstance(each, list) else each
            for name, each in right.items()
        }
    is_new = vary.escalate is not None and not vary.keeps_answer
    if like is PLAIN:
        return plain_answers(of, requests, **{"tier": "large"} if is_new else {})
    return serve_in(like, requests, of).answers


def _behind(whole: Answer, num_tokens: int) -> Answer:
    """What is left of an answer behind its first tokens."""
    rest = copy.copy(whole)
    rest.token_ids, rest.logprobs = whole.token_ids[num_tokens:], whole.logprobs[num_tokens:]
    return rest


def _assert_shown(vary: Way, served: Served) -> None:
    for name in vary.shows:
        # What the first turn finds in the caches, it has written itself.
        turns = served.turns[-1:] if name == "num_cached_tokens" else served.turns
        assert sum(total(answers, name) for answers in turns) > 0, f"{name} is 0"
