"""The pace of an answer by how many are written at once."""

import random

import pytest

from outrider.engine.answer_pace import AnswerPace


def learnt(
    *, base_s: float, row_s: float, tokens: int = 1, numbers: range = range(1, 9)
) -> AnswerPace:
    pace, rng = AnswerPace(), random.Random(0)
    for _ in range(400):
        number = rng.choice(numbers)
        seconds = base_s + row_s * number
        pace.note(num_answers=number, num_tokens=number * tokens, elapsed_s=seconds)
    return pace


def test_a_line_is_found_and_continued() -> None:
    pace = learnt(base_s=0.004, row_s=0.001)
    for number in (1, 4, 8, 12):
        assert pace.expected_s(number) == pytest.approx(0.004 + 0.001 * number, rel=0.1)


def test_more_tokens_a_step_are_a_quicker_pace() -> None:
    assert learnt(base_s=0.01, row_s=0.0, tokens=4).expected_s(4) == pytest.approx(0.0025)


def test_steps_that_were_all_alike_say_little_of_other_numbers() -> None:
    pace = learnt(base_s=0.01, row_s=0.001, numbers=range(4, 5))
    assert pace.expected_s(4) == pytest.approx(0.014)
    assert pace.expected_s(8) == pytest.approx(0.014)


def test_more_answers_are_never_expected_to_be_quicker() -> None:
    pace = AnswerPace()
    for number in range(1, 60):
        pace.note(num_answers=number, num_tokens=number, elapsed_s=1.0 / number)
    assert pace.expected_s(60) >= pace.expected_s(1) > 0.0


def test_too_few_steps_and_empty_ones_say_nothing() -> None:
    pace = AnswerPace()
    for _ in range(10):
        pace.note(num_answers=2, num_tokens=2, elapsed_s=1.0)
    for _ in range(100):
        pace.note(num_answers=0, num_tokens=0, elapsed_s=1.0)
        pace.note(num_answers=2, num_tokens=0, elapsed_s=1.0)
    assert pace.expected_s(2) == 0.0


def test_a_machine_that_has_become_slower_is_noticed() -> None:
    pace = learnt(base_s=0.01, row_s=0.0)
    for _ in range(500):
        pace.note(num_answers=4, num_tokens=4, elapsed_s=0.03)
    assert pace.expected_s(4) == pytest.approx(0.03, rel=0.05)
