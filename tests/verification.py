"""OUTRIDER_VERIFY=1: each answer of a test's engine is asked for again, in other configurations.

Four things must not change an answer: what guesses it, what is answered beside it, what the caches
hold, and an end in its middle. So each request is answered anew alone, without speculation, by an
engine with cold caches that finds no prefix; and the first half of its answer is resumed by an
engine like the test's. Requests with a right to another answer are left out (`is_repeatable`).
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from outrider.engine.core import Engine
from outrider.engine.events import Finished, TokensEmitted
from outrider.engine.request import NO_OBJECTIVE, EngineRequest

if TYPE_CHECKING:
    from tests.engines import Answer

IS_ON: Final = os.environ.get("OUTRIDER_VERIFY") == "1"

MakeTwin = Callable[..., Engine]
"""Makes an engine like another one, but for the arguments that are given."""

_TWINS: Final[WeakKeyDictionary[Engine, MakeTwin]] = WeakKeyDictionary()
_MOST_STEPS: Final = 20_000


def remember(engine: Engine, make_twin: MakeTwin) -> None:
    """Know how to make another engine like this one."""
    _TWINS[engine] = make_twin


def verify(engine: Engine, requests: Iterable[EngineRequest], answers: "dict[str, Answer]") -> None:
    """Ask for the answers again. Fails where one of them is another one."""
    make_twin = _TWINS.get(engine)
    if make_twin is None or not _is_exact(engine):
        return
    for request in requests:
        answer = answers[request.request_id]
        if not is_repeatable(request, answer):
            continue
        right = [*(request.resumed_token_ids or ()), *answer.token_ids]
        plain = make_twin(speculates=False, drafter=None, prefix_caching=False)
        again = replace(request, objective=NO_OBJECTIVE, resumed_token_ids=None, pin=None)
        _compare(request, "alone, without speculation, cold", right, _tokens(plain, again))
        half = tuple(right[: len(right) // 2])
        resumed = _tokens(make_twin(), replace(again, resumed_token_ids=half))
        _compare(request, "resumed", right, [*half, *resumed])


def is_repeatable(request: EngineRequest, answer: "Answer") -> bool:
    """True if the answer is the one that its tier, its seed and its text say.

    What needs both models, a cascade or the judging of one, cannot be asked without speculation.
    """
    has_ended = answer.finished is not None and answer.finished.finish_reason != "abort"
    is_changed = bool(answer.switches) or request.may_escalate or request.needs_both_models
    return has_ended and not is_changed and not request.adapters


def _is_exact(engine: Engine) -> bool:
    """True if sums in another order cannot make another answer likelier: float32 all over."""
    runners = engine._runners.values()
    return all(
        runner.model.dtype == torch.float32 and runner.kv_cache.dtype == torch.float32
        for runner in runners
    )


def _tokens(engine: Engine, request: EngineRequest) -> list[int]:
    """Answer one request alone."""
    engine.submit(request)
    tokens: list[int] = []
    for _ in range(_MOST_STEPS):
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                return tokens
    raise AssertionError(f"{request.request_id} does not end when it is asked again")


def _compare(request: EngineRequest, how: str, right: list[int], found: list[Any]) -> None:
    assert found == right, f"{request.request_id} has another answer {how}: {found} not {right}"
