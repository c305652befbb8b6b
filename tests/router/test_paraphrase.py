import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.paraphrase import PARAPHRASES, count_flips, paraphrase

QUESTION = "Which planet is largest?\nA. Mars\nB. Jupiter\nC. Venus\nD. Mercury"


@given(st.text(max_size=200), st.sampled_from(sorted(PARAPHRASES)))
def test_any_prompt_has_every_paraphrase_and_always_the_same(text: str, kind: str) -> None:
    assert paraphrase(text, kind, seed=1) == paraphrase(text, kind, seed=1)


def test_lone_surrogates_and_long_prompts_are_taken() -> None:
    for kind in PARAPHRASES:
        paraphrase("\udcff option " * 10_000, kind)


def test_the_words_stay() -> None:
    assert paraphrase(QUESTION, "case").lower() == QUESTION.lower()
    assert paraphrase(QUESTION.lower(), "case").lower() == QUESTION.lower()
    assert paraphrase(QUESTION, "spacing").split() == QUESTION.split()
    assert sorted(paraphrase(QUESTION, "typos")) == sorted(QUESTION)


def test_options_get_another_order_behind_the_same_letters() -> None:
    others = (paraphrase(QUESTION, "options", seed=seed) for seed in range(9))
    other = next(found for found in others if found != QUESTION)
    lines = other.split("\n")
    assert lines[0] == "Which planet is largest?"
    assert [line[:3] for line in lines[1:]] == ["A. ", "B. ", "C. ", "D. "]
    assert {line[3:] for line in lines[1:]} == {"Mars", "Jupiter", "Venus", "Mercury"}
    assert paraphrase("A. one option only", "options") == "A. one option only"


def test_a_typo_swaps_neighbours_in_a_word() -> None:
    assert paraphrase("word", "typos") == "wrod"
    assert paraphrase("a to 1234", "typos") == "a to 1234"


def test_flips_count_the_prompts_that_a_change_reaches() -> None:
    found = count_flips([QUESTION, "hello there"], lambda prompt: prompt.islower())
    assert found["case"].num_prompts == 2
    assert found["case"].share == pytest.approx(1.0)  # the one rises, the other falls
    assert found["typos"].share == 0.0
    assert found["options"].num_prompts <= 1
    assert count_flips([], len)["case"].share == 0.0
