"""A request whose grammar or rules break fails alone: its neighbours' answers do not change.

On the shipped pair, drafting on. Each poisoned request breaks at one place, after it has worked for
a while; every other request's text is the one that it has without such a neighbour.
"""

from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from outrider.draft.text.text_sources import TextSources
from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Failed
from outrider.engine.grammar.grammar import GrammarState, TokenGrammar, TokenMatcher
from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.cpu.product_library import product_support
from outrider.verifier.logit_rules import SamplingRule
from tests.engines import (
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    texts,
)
from tests.grammars import schema_spec, shipped_compiler

POISON = "poison"
SPEC = schema_spec({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})


class BrokenError(Exception):
    """No kind of exception that the engine could know."""


class Fuse:
    """Raises at the call with a given number of one method, on any thread."""

    def __init__(self, place: str, after: int) -> None:
        self.place, self.left = place, after

    def burn(self, place: str) -> None:
        if place != self.place:
            return
        self.left -= 1
        if self.left < 0:
            raise BrokenError(place)


class FusedMatcher:
    def __init__(self, inner: TokenMatcher, fuse: Fuse) -> None:
        self._inner, self._fuse = inner, fuse

    def accept(self, token_id: int) -> bool:
        self._fuse.burn("accept")
        return self._inner.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._fuse.burn("rollback")
        self._inner.rollback(num_tokens)

    def fill_mask(self, mask: Any) -> None:
        self._fuse.burn("fill_mask")
        self._inner.fill_mask(mask)


class FusedGrammar:
    def __init__(self, inner: TokenGrammar, fuse: Fuse) -> None:
        self._inner, self._fuse = inner, fuse
        self.vocab_size = inner.vocab_size
        self.stop_token_ids = inner.stop_token_ids
        self.left_out = inner.left_out

    def matcher(self) -> TokenMatcher:
        self._fuse.burn("matcher")
        return FusedMatcher(self._inner.matcher(), self._fuse)

    def mask_logits(self, logits: Any, masks: Any) -> None:
        self._fuse.burn("mask_logits")
        self._inner.mask_logits(logits, masks)


class FusedCompiler:
    """Gives out grammars that break; what it compiles is right until then."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def compile(
        self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
    ) -> "Future[TokenGrammar]":
        self._fuse.burn("compile")
        future: Future[TokenGrammar] = Future()
        try:
            self._fuse.burn("future")
            future.set_result(FusedGrammar(shipped_compiler().compile(spec).result(), self._fuse))
        except BrokenError as error:
            future.set_exception(error)
        return future


def neighbours() -> list[EngineRequest]:
    prompts = heldout_prompts(5)
    return [
        make_request(
            f"n{number}",
            prompts[number],
            max_tokens=24,
            temperature=0.8 * (number % 2),
            seed=number,
            tier="small" if number == 3 else "large",
            presence_penalty=0.5 * (number == 1),
        )
        for number in range(5)
    ]


@cache
def undisturbed() -> dict[str, list[int]]:
    return texts(serve(make_engine(shipped_pair()), neighbours()))


def poisoned(**changes: Any) -> EngineRequest:
    request = make_request(POISON, heldout_prompts(6)[5], max_tokens=40)
    return replace(request, **changes)


def run(engine: Engine, poison: EngineRequest) -> list[EngineEvent]:
    """Serve the neighbours with the poison among them; returns the poison's events."""
    own: list[EngineEvent] = []
    step = engine.step

    def step_of_the_others(*arguments: Any) -> list[EngineEvent]:
        events = step(*arguments)
        own.extend(event for event in events if event.request_id == POISON)
        return [event for event in events if event.request_id != POISON]

    engine.step = step_of_the_others  # type: ignore[method-assign]
    engine.submit(poison)
    answers = serve(engine, neighbours())
    assert texts(answers) == undisturbed()
    assert_idle(engine)
    return own


PLACES = [
    ("matcher", 0),
    ("fill_mask", 0),
    ("fill_mask", 3),
    ("accept", 4),
    ("mask_logits", 2),
    ("rollback", 1),
]
QUICK_PLACES = PLACES[:1] + PLACES[2:5]


@pytest.mark.parametrize(
    ("place", "after", "where"),
    [
        *(
            pytest.param(*place, "large", marks=() if place in QUICK_PLACES else pytest.mark.slow)
            for place in PLACES
        ),
        ("fill_mask", 3, "small"),
        ("fill_mask", 3, "large on device"),
        *(
            pytest.param(*place, "small", marks=pytest.mark.slow)
            for place in PLACES
            if place != ("fill_mask", 3)
        ),
    ],
)
def test_a_grammar_that_breaks_ends_its_request_only(place: str, after: int, where: str) -> None:
    tier, _, on_device = where.partition(" ")
    compiler = FusedCompiler(Fuse(place, after))
    engine = make_engine(
        shipped_pair(), on_device=bool(on_device), grammars={"large": compiler, "small": compiler}
    )
    own = run(engine, poisoned(grammar=SPEC, tier=tier))
    if place == "rollback" and tier == "small":
        assert not isinstance(own[-1], Failed), "a chain is never rolled back"
        return
    if place == "mask_logits" and tier == "small" and product_support().library is not None:
        assert not isinstance(own[-1], Failed), "the library takes masks, and no logits are changed"
        return
    assert isinstance(own[-1], Failed)
    assert own[-1].code == ("invalid_grammar" if place == "matcher" else "request_failed")
    assert "BrokenError" in own[-1].message
    assert sum(isinstance(event, Failed) for event in own) == 1
    assert own[-1].stats is not None


def test_a_traced_answer_whose_grammar_breaks_while_it_is_explained() -> None:
    compiler = FusedCompiler(Fuse("mask_logits", 10**9))
    engine = make_engine(shipped_pair(), grammars={"large": compiler})
    poison = poisoned(grammar=SPEC, traces=True)
    engine.submit(poison)
    engine.step()
    sequence = engine._sequences[POISON]
    assert sequence.grammar is not None
    sequence.grammar.forced_tokens = _broken  # type: ignore[method-assign]
    events = [event for _ in range(40) if engine.has_work for event in engine.step()]
    assert isinstance(events[-1], Failed)
    assert_idle(engine)


@pytest.mark.slow_cases
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_guesses_that_break_end_their_request_only(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = TextSources.guess

    def guess_or_break(self: TextSources, sequence: Sequence, *arguments: Any) -> Any:
        if sequence.request_id == POISON and sequence.num_output_tokens > 3:
            raise BrokenError("a guess")
        return guess(self, sequence, *arguments)

    monkeypatch.setattr(TextSources, "guess", guess_or_break)
    # Asked for what it expects; what repeats is looked up for all at once.
    poison = replace(poisoned(), prediction_token_ids=(1, 2, 3))
    own = run(make_engine(shipped_pair(), on_device=on_device), poison)
    assert isinstance(own[-1], Failed)
    assert own[-1].code == "request_failed"


def test_a_sampling_rule_that_breaks_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect = SamplingRule.collect

    def collect_or_break(self: SamplingRule, *arguments: Any) -> None:
        if 7 in self._bias:
            raise BrokenError("a bias of 7")
        collect(self, *arguments)

    monkeypatch.setattr(SamplingRule, "collect", collect_or_break)
    request = poisoned()
    sampling = replace(request.sampling, logit_bias=((7, 1.0),))
    own = run(make_engine(shipped_pair()), replace(request, sampling=sampling))
    assert isinstance(own[-1], Failed)
    assert own[-1].code == "request_failed"


@pytest.mark.parametrize("place", ["future", "compile"])
def test_a_compiler_that_breaks_refuses_its_request_only(place: str) -> None:
    compiler = FusedCompiler(Fuse(place, 0))
    engine = make_engine(shipped_pair(), grammars={"large": compiler})
    poison = poisoned(grammar=SPEC)
    if place == "compile":
        with pytest.raises(BrokenError):
            engine.submit(poison)
        assert not engine.has_work, "nothing is left of a request that could not be queued"
        return
    own = run(engine, poison)
    assert [(event.code, event.request_id) for event in own if isinstance(event, Failed)] == [
        ("invalid_grammar", POISON)
    ]


@pytest.mark.parametrize("call", ["accept", "fill_mask"])
@pytest.mark.parametrize("call_s", [0.002, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_grammar_that_takes_too_long_ends_its_request_only(
    call: str, call_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes `call_s` of processor time by a clock that stands still otherwise.

    An ambiguous grammar is slow to accept a token: 41 ms for the 400th, and more with each.
    """
    now_s = 0.0
    original = getattr(FusedMatcher, call)

    def slowly(self: FusedMatcher, argument: Any) -> Any:
        nonlocal now_s
        now_s += call_s
        return original(self, argument)

    monkeypatch.setattr(FusedMatcher, call, slowly)
    monkeypatch.setattr(
        "outrider.engine.queue.grammar_queue.GrammarState",
        partial(GrammarState, clock=lambda: now_s),
    )
    engine = make_engine(shipped_pair(), grammars={"large": FusedCompiler(Fuse("never", 0))})
    own = run(engine, poisoned(grammar=SPEC))
    if call_s < 0.01:
        assert not any(isinstance(event, Failed) for event in own)
        return
    assert isinstance(own[-1], Failed)
    assert own[-1].code == "invalid_grammar"
    assert "takes too long" in own[-1].message
    assert now_s < 1.0


def test_running_out_of_memory_is_no_request_s_own_failure() -> None:
    compiler = FusedCompiler(Fuse("mask_logits", 10**9))
    engine = make_engine(shipped_pair(), grammars={"large": compiler})
    engine.submit(poisoned(grammar=SPEC))
    engine.step()
    grammar = engine._sequences[POISON].grammar
    assert grammar is not None
    grammar.apply = _out_of_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        engine.step()


def _broken(*_: Any) -> Any:
    raise BrokenError


def _out_of_memory(*_: Any) -> Any:
    raise MemoryError
