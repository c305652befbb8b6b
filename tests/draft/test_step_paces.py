"""Steps with guesses are kept in company while they yield more tokens a second, and only then."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from draft.step_paces import StepPaces


@dataclass
class Stream:
    """As much of a sequence as is looked at."""

    request_id: str
    num_output_tokens: int = 0
    cascade: object = None


def kinds(
    number: int, num_steps: int, step: Callable[[bool, int], tuple[int, float]], **fields: Any
) -> list[bool]:
    """Which steps had guesses. step: tokens of a stream, and seconds, by kind and number."""
    now = 0.0
    paces = StepPaces(lambda: now)
    streams = [Stream(str(each), **fields) for each in range(number)]
    found = []
    for index in range(num_steps):
        found.append(paces.wants_guesses(cast(Any, streams)))
        tokens, seconds = step(found[-1], index)
        now += seconds
        for stream in streams:
            stream.num_output_tokens += tokens
    return found


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


def test_guesses_that_slow_a_company_down_are_left_to_probes() -> None:
    found = kinds(16, 2000, lambda kind, _: (2, 2.2) if kind else (1, 1.0))
    assert share(found[100:]) < 0.15
    assert any(found[-600:])


def test_guesses_that_pay_are_kept() -> None:
    found = kinds(16, 2000, lambda kind, _: (2, 1.2) if kind else (1, 1.0))
    assert share(found[100:]) > 0.95
    assert not all(found)


def test_what_pays_may_change() -> None:
    def step(kind: bool, index: int) -> tuple[int, float]:
        gain = 1.1 if index < 1000 else 4.0
        return (2, 2.0 / gain * 1.3) if kind else (1, 1.0)

    found = kinds(12, 3000, step)
    assert share(found[100:900]) < 0.3
    assert share(found[-1000:]) > 0.9


def test_a_long_step_with_a_prompt_beside_it_says_nothing() -> None:
    def step(kind: bool, index: int) -> tuple[int, float]:
        return (2 if kind else 1), 50.0 if kind and index % 9 == 0 else 1.0

    assert share(kinds(16, 2000, step)[100:]) > 0.95


@pytest.mark.parametrize("number", [1, 4, 11])
def test_few_streams_always_have_guesses(number: int) -> None:
    assert all(kinds(number, 300, lambda kind, _: (1, 9.0 if kind else 1.0)))


def test_a_cascade_always_has_guesses() -> None:
    found = kinds(16, 300, lambda kind, _: (1, 9.0 if kind else 1.0), cascade=object())
    assert all(found)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    found = kinds(16, 300, lambda kind, _: (1, 0.0))
    assert share(found) > 0.5
