"""The cascade on real questions: who is right, what the large model writes, what figures say."""

import gzip
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.routing.bench_real_cascade import (
    Asked,
    curve_of,
    judged,
    kinds_of,
    policy_figures,
    score_figures,
)
from benchmarks.routing.real_answers import RealAnswer, Way, scripted
from benchmarks.routing.real_questions import (
    HUMAN_EVAL,
    SPEC_BENCH,
    RealQuestion,
    common_words,
    load_questions,
    number_is,
    passes_tests,
    says_one_of,
    written_code,
)
from benchmarks.shared.mock_upstream import mock_in_thread

HEAD = 'import math\n\ndef twice(number: int) -> int:\n    """Double it."""\n'
TESTS = "def check(candidate):\n    assert candidate(4) == 8\n"


def test_sums_are_judged_by_their_last_number() -> None:
    is_right = number_is("3 * 400 = 1,200\n#### 1,200")
    assert is_right("So she has 1200 dollars.")
    assert is_right("That is $1,200.00")
    assert not is_right("1200 in all, less 3")
    assert not is_right("many")


def test_a_passage_is_judged_by_the_words_of_a_name() -> None:
    is_right = says_one_of(("the United States", "623"))
    assert is_right("It is in United States.")
    assert is_right("The codes are 602,623")
    assert not is_right("United we stand; 6234")


@pytest.mark.slow
def test_code_is_judged_by_its_tests() -> None:
    is_right = passes_tests(HEAD, "twice", TESTS)
    assert is_right("Here:\n```python\ndef twice(n):\n    return 2 * n\n```\nIt doubles.")
    assert is_right("```python\n    return 2 * number\n```"), "a body alone"
    assert not is_right("```python\ndef twice(n):\n    return n\n```")
    assert not is_right("It doubles the number.")
    assert not is_right("```python\ndef twice(n):\n    while True: pass\n```")


def test_code_is_found_with_and_without_its_head() -> None:
    for answer in ("```\n    return 1\n```", "    return 1\n", "```python\n    return 1\n"):
        assert written_code(answer, HEAD, "twice") == f"{HEAD}    return 1\n"
    assert written_code("no code", HEAD, "twice") is None


def test_common_words_are_counted_in_any_order() -> None:
    assert common_words("The cat, a dog.", "dog cat") == 1.0
    assert common_words("cat cat cat", "cat") == 0.5
    assert common_words("", "") == 0.0


def test_kinds_take_turns(tmp_path: Path) -> None:
    rows = [
        {"category": "rag", "turns": ["Who?"], "reference": [["Ann", "Anna"]]},
        {"category": "rag", "turns": ["Whose?"], "reference": [["Bob"]]},
        {"category": "writing", "turns": ["Write."]},
        {"category": "math_reasoning", "turns": ["1 + 1?"], "reference": ["<<1+1=2>>2\n#### 2"]},
    ]
    code = {"prompt": HEAD, "entry_point": "twice", "test": TESTS, "canonical_solution": "    x\n"}
    (tmp_path / "prompts").mkdir()
    (tmp_path / SPEC_BENCH).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / HUMAN_EVAL).write_bytes(gzip.compress(json.dumps(code).encode()))
    found = load_questions(tmp_path, 2)
    assert [question.prompt for question in found[::3]] == ["Who?", "Whose?"]
    assert [question.reference for question in found[:2]] == ["Ann", "2\nThe answer is 2"]
    assert found[2].kind == "code"
    with pytest.raises(SystemExit, match="spec_bench"):
        load_questions(tmp_path / "elsewhere", 1)


def a_question(number: int, kind: str = "a passage") -> RealQuestion:
    return RealQuestion(
        kind=kind,
        prompt=f"question {number}",
        reference=f"it is {number}",
        is_right=None if kind == "translation" else number_is(str(number)),
    )


def test_the_large_model_writes_the_reference_a_word_at_a_time() -> None:
    questions = [a_question(7)]
    script = scripted(questions, max_words=2, first_token_s=0.0, gap_s=0.0)
    asked = {"messages": [{"role": "user", "content": "question 7"}]}
    with mock_in_thread(script) as large:
        answer = httpx.post(f"{large.url}/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "it is"
        made = script(large.requests[0])
    assert made.pieces == ("it", " is")


def an_answer(way: Way, text: str, logprob: float = -0.1) -> RealAnswer:
    return RealAnswer(
        way=way,
        text=text,
        first_s=0.1,
        whole_s=0.2,
        num_tokens=3,
        tokens=(text,),
        logprobs=(logprob,),
        held_tokens=0 if way == "at once" else 16,
        discarded_tokens=16 if way == "handed over" else 0,
        confidence=None,
        reason="",
    )


def test_figures_tell_what_the_choice_gains_over_chance() -> None:
    questions = [a_question(number) for number in range(4)] + [a_question(9, "translation")]
    small = [an_answer("kept", str(number % 2), -float(number)) for number in range(5)]
    is_right = judged(questions, small)
    np.testing.assert_array_equal(is_right, [1, 1, 0, 0, np.nan])
    ways: tuple[Way, ...] = ("kept", "kept", "handed over", "at once", "at once")
    answers = [an_answer(way, answer.text) for way, answer in zip(ways, small, strict=True)]
    asked = Asked(answers=answers, threshold=0.3, num_predictions=0)
    found = policy_figures(asked, is_right)
    assert found["right"].estimate == 1.0
    assert found["over_chance"].estimate == pytest.approx(1.0 - 0.75)
    assert found["large_share"] == pytest.approx(0.6)
    assert found["small_tokens_given_up"] == 16
    assert found["small_tokens_kept"] == 6
    assert [found["ways"][way]["share"] for way in ("kept", "handed over", "at once")] == [
        pytest.approx(0.4),
        pytest.approx(0.2),
        pytest.approx(0.4),
    ]


def test_scores_are_judged_where_answers_are() -> None:
    questions = [a_question(number) for number in range(4)] + [a_question(9, "translation")]
    is_right = np.array([1, 1, 0, 0, np.nan])
    scores = np.array([0.9, 0.8, 0.2, 0.1, 0.5])
    found = score_figures(questions, scores, is_right)
    assert found["auroc"]["all"].estimate == 1.0
    assert list(found["auroc"]) == ["all", "a passage"]
    assert curve_of(scores, is_right) == [(0, 0.5), (0.25, 0.75), (0.5, 1), (0.75, 1), (1, 1)]
    small = [an_answer("kept", "it is 1") for _ in questions]
    asked = {"always small": Asked(answers=small, threshold=None, num_predictions=0)}
    kinds = kinds_of(questions, is_right, asked)
    assert kinds["a passage"]["small_right"] == 0.5
    assert kinds["translation"]["small_right"] is None
    assert kinds["translation"]["agreement_held"] == pytest.approx(2 / 3)
    assert kinds["translation"]["kept"] == {"always small": 1.0}
