import numpy as np

from outrider.router.calibration import StageRows, measure
from outrider.router.mistakes import common_words, find_mistakes


def test_surest_mistakes_first_and_right_decisions_never() -> None:
    quality = np.array([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    rows = StageRows(
        text=quality,
        prompt=quality,
        answer=None,
        weak=np.array([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
        strong=np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    )
    prompts = [f"prompt {name}" for name in "abcdef"]
    found = find_mistakes(prompts, rows, measure(rows, 0.5), num_examples=1)
    # Small answered a, b, c; of these a and b were the large model's. d and f gained nothing.
    assert (found.missed.num_mistakes, found.missed.num_decisions) == (2, 3)
    assert [mistake.prompt for mistake in found.missed.examples] == ["prompt a"]
    assert (found.needless.num_mistakes, found.needless.num_decisions) == (2, 3)
    assert [mistake.prompt for mistake in found.needless.examples] == ["prompt f"]
    assert found.missed.examples[0].quality == 0.9


def test_one_example_stands_for_prompts_that_begin_alike() -> None:
    count = 30
    quality = np.linspace(0.6, 0.9, count)
    rows = StageRows(
        text=quality, prompt=quality, answer=None, weak=np.zeros(count), strong=np.ones(count)
    )
    prompts = [
        "Which of these two scenarios is wrong by the standards of its time: " + str(n)
        for n in range(count - 1)
    ]
    found = find_mistakes([*prompts, "Add 1 and 2."], rows, measure(rows, 0.5))
    assert found.missed.num_mistakes == count
    assert [mistake.prompt for mistake in found.missed.examples] == ["Add 1 and 2.", prompts[-1]]


def test_words_that_mistakes_share() -> None:
    mistakes = [f"Find the square root of {number}" for number in range(20)]
    others = [f"Find the sum of {number} and 7" for number in range(200)]
    words = common_words(mistakes, others)
    assert {"square", "square root", "root of"} <= {entry.text for entry in words}
    assert "find" not in {entry.text for entry in words}
    first = words[0]
    assert (first.share_of_mistakes, first.share_of_others) == (1.0, 0.0)
    assert [entry.z for entry in words] == sorted((entry.z for entry in words), reverse=True)


def test_chance_finds_no_words() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcdefghij"), 6)) for _ in range(400)]
    assert common_words(texts[:200], texts[200:]) == ()
    assert common_words([], texts) == ()


def test_digits_are_one_and_a_word_counts_once_a_prompt() -> None:
    mistakes = ["year 1984 1985 1986"] * 5
    words = {entry.text: entry for entry in common_words(mistakes, ["no"] * 50)}
    assert words["0000"].share_of_mistakes == 1.0
