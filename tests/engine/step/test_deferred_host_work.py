"""Work that waits until the device is busy: what it changes, and that it is always done."""

import pytest

from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Finished
from outrider.engine.step.deferred_host_work import DeferredHostWork
from tests.engines import (
    Answer,
    assert_idle,
    finish,
    make_engine,
    make_request,
    random_prompt,
    tiny_pair,
)
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
