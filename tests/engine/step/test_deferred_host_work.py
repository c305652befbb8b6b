"""Work that waits until the device is busy: what it changes, and that it is always done."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Finished
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.step.deferred_host_work import DeferredHostWork
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.next_tokens import NextToken
from outrider.verifier.params import TIERS, Tier
from outrider.verifier.verdict import Verdict
from tests.engine.grammar.compiling import PERSON
from tests.engines import (
    Answer,
    assert_idle,
    chat_prompt,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.laws.same_answers import plainly

REQUESTS = [
    make_request("short", random_prompt(9), max_tokens=3),
    make_request("long", random_prompt(30, seed=1), max_tokens=25),
    make_request("sampled", random_prompt(20, seed=2), max_tokens=20, temperature=0.9, seed=4),
]


def overlapping_engine() -> Engine:
    """As on a GPU: the passes of a CPU are over at once, but the order of things is the same."""
    engine = make_engine(tiny_pair(), on_device=True)
    assert not engine.overlaps, "a CPU has nothing to wait beside"
    engine._host_work.overlaps = True
    return engine


def test_work_is_done_at_once_or_at_the_next_run_and_in_order() -> None:
    done: list[int] = []
    work = DeferredHostWork(overlaps=True)
    work.defer(lambda: done.append(1))
    work.defer(lambda: done.append(2))
    assert not done
    work.run()
    work.run()
    assert done == [1, 2]
    DeferredHostWork(overlaps=False).defer(lambda: done.append(3))
    assert done == [1, 2, 3]


@pytest.mark.slow
def test_answers_are_the_same_and_no_lesson_is_lost() -> None:
    plain = plainly(tiny_pair(), REQUESTS)
    versions = []
    for engine in (make_engine(tiny_pair(), on_device=True), overlapping_engine()):
        answers: dict[str, Answer] = {}
        for request in REQUESTS:
            engine.submit(request)
        finish(engine, answers)
        assert {name: answer.token_ids for name, answer in answers.items()} == plain
        assert_idle(engine)
        assert not engine._host_work._waiting
        drafter = engine._drafter
        assert drafter is not None
        versions.append(drafter._lessons.calibration.version)  # type: ignore[attr-defined]
    assert versions[0] > 0
    assert versions[1] > 0


def test_the_callers_work_is_done_once_a_step_behind_the_first_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = overlapping_engine()
    log: list[str] = []
    for tier, runner in engine._runners.items():
        forward = runner.forward

        def logged(*args, forward=forward, tier=tier, **options):  # type: ignore[no-untyped-def]
            log.append(tier)
            return forward(*args, **options)

        monkeypatch.setattr(runner, "forward", logged)
    for request in REQUESTS[:2]:
        engine.submit(request)
    events: list[EngineEvent] = []
    while engine.has_work:
        first = len(log)
        events += engine.step(while_busy=lambda: log.append("caller"))
        assert log[first:].count("caller") == 1
        assert log[first + 1] == "caller"
    assert sum(isinstance(event, Finished) for event in events) == 2


def test_deferred_work_runs_in_a_step_without_computation() -> None:
    engine = overlapping_engine()
    done: list[int] = []
    engine.step(while_busy=lambda: done.append(1))
    assert done == [1]


class WatchedVerifier(CoupledVerifier):
    """Says while a pass is judged."""

    is_busy = False

    def verify(self, *arguments: Any) -> list[Verdict]:
        self.is_busy = True
        verdicts = super().verify(*arguments)
        self.is_busy = False
        return verdicts

    def next_tokens(self, *arguments: Any) -> list[NextToken]:
        self.is_busy = True
        tokens = super().next_tokens(*arguments)
        self.is_busy = False
        return tokens


@pytest.mark.slow
def test_the_masks_of_grammars_are_worked_out_beside_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = WatchedVerifier()
    compilers: dict[Tier, GrammarCompiler] = {tier: shipped_compiler() for tier in TIERS}
    engine = make_engine(shipped_pair(), grammars=compilers, verifier=verifier, on_device=True)
    requests = [
        replace(
            make_request(tier, chat_prompt("hi"), max_tokens=24, tier=tier),
            grammar=schema_spec(PERSON),
        )
        for tier in TIERS
    ]
    found: list[bool] = []
    matcher = type(shipped_compiler().compile(schema_spec(PERSON)).result(20).matcher())
    fill_mask = matcher.fill_mask

    def noted(self: Any, mask: Any) -> None:
        found.append(verifier.is_busy)
        fill_mask(self, mask)

    monkeypatch.setattr(matcher, "fill_mask", noted)
    plain = {name: answer.token_ids for name, answer in serve(engine, requests).items()}
    assert any(found), "no mask was found late, so this test says nothing"
    found.clear()
    engine._host_work.overlaps = True
    answers = serve(engine, requests)
    assert {name: answer.token_ids for name, answer in answers.items()} == plain
    assert found
    assert not any(found)
