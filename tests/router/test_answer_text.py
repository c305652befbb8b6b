"""Faults that an answer's text shows by itself."""

import pytest

from outrider.router.answer_text import text_fault


@pytest.mark.parametrize(
    "text",
    [
        "The sum is 85.",
        "No, no, no: that is three times.",
        "I don't think so: 7 is prime.",
        "I cannot recommend this book enough.",
        "1 1 1",
        "ones: 8+7=15, write 5, carry 1\ntens: 4+3+1=8, write 8, carry 0\nAnswer: 85.",
    ],
)
def test_answers_that_show_no_fault(text: str) -> None:
    assert text_fault(text, is_whole=True) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("  \n", "it is empty"),
        ("I do not know.", "it says that it cannot answer"),
        ("I\u2019m not sure, but", "it says that it cannot answer"),
        ("go go go go", "it repeats itself"),
        ("well " + "and then again " * 4, "it repeats itself"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    assert text_fault(text, is_whole=True) == fault


def test_a_beginning_may_be_empty() -> None:
    assert text_fault(" ", is_whole=False) is None
