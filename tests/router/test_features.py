from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.features import (
    STATISTICS,
    FeatureConfig,
    prompt_features,
)

CONFIG = FeatureConfig()
EDGES = dict(STATISTICS)


def dense(text: str, config: FeatureConfig = CONFIG) -> np.ndarray:
    vector = prompt_features(text, config)
    result = np.zeros(config.num_features)
    result[vector.indices] = vector.values
    return result


def reached_steps(text: str) -> dict[str, int]:
    """How many of its edges each statistic of a prompt reaches."""
    last = dense(text)[-sum(len(edges) for edges in EDGES.values()) :]
    steps = np.count_nonzero(last.reshape(len(EDGES), -1), axis=1)
    return dict(zip(EDGES, steps.tolist(), strict=True))


def _num_steps(name: str, value: float) -> int:
    return sum(value >= edge for edge in EDGES[name])


@given(st.text(alphabet=st.characters(), max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_string_has_features_of_the_promised_form(text: str) -> None:
    vector = prompt_features(text, CONFIG)
    assert len(vector.indices) == len(vector.values)
    assert (np.diff(vector.indices) > 0).all()
    assert vector.indices.min(initial=0) >= 0
    assert vector.indices.max(initial=0) < CONFIG.num_features
    assert np.isfinite(vector.values).all()


@pytest.mark.parametrize("text", ["", " ", "\x00", "\ud800 alone", "İstanbul İ", "日本語" * 400])
def test_odd_strings(text: str) -> None:
    assert np.isfinite(prompt_features(text, CONFIG).values).all()


def test_blocks_have_norm_one() -> None:
    vector = dense("What is the capital of France? The the the the the.")
    chars, words = np.split(vector[: 2 * 8192], 2)
    assert np.linalg.norm(chars) == pytest.approx(1.0)
    assert np.linalg.norm(words) == pytest.approx(1.0)


def test_an_ngram_has_one_place_wherever_it_stands() -> None:
    config = FeatureConfig(num_char_features=0, max_word_ngram=1, statistic_scale=0.0)
    first_step = config.num_features - 16 * len(STATISTICS)
    alone, late = (
        {index for index in prompt_features(text, config).indices.tolist() if index < first_step}
        for text in ("zebra", "so many words, then: a ZEBRA!")
    )
    assert len(alone) == 1
    assert alone < late


def test_word_order_matters_through_pairs() -> None:
    config = FeatureConfig(num_char_features=0)
    assert not np.array_equal(dense("dog bites man", config), dense("man bites dog", config))
    single = FeatureConfig(num_char_features=0, max_word_ngram=1)
    assert np.allclose(dense("dog bites man", single), dense("man bites dog", single))


def test_digits_are_masked_but_their_number_is_kept() -> None:
    assert np.array_equal(dense("What is 347 + 58?"), dense("What is 912 + 60?"))
    assert not np.array_equal(dense("What is 347 + 58?"), dense("What is 347 + 5800?"))


def test_statistics_of_a_known_prompt() -> None:
    reached = reached_steps('How many?\nAdd 12, 345 and {"a": 7} = ?')
    expected = {
        "num_lines": 2,
        "num_words": 8,
        "num_digits": 6,
        "num_numbers": 3,
        "longest_number": 3,
        "mean_number_tenths": 20,
        "num_question_marks": 2,
        "num_commas": 1,
        "num_quotes": 2,
        "num_operators": 1,
        "num_question_words": 1,
        "num_capital_words": 2,
    }
    assert {name: reached[name] for name in expected} == {
        name: _num_steps(name, value) for name, value in expected.items()
    }


def test_only_head_and_tail_are_read() -> None:
    head, tail = "h" * CONFIG.max_head_chars, "t" * CONFIG.max_tail_chars
    left = head + "one middle " * 500 + tail
    right = head + "ein anderes" * 500 + tail
    assert len(left) == len(right)
    assert np.array_equal(dense(left), dense(right))
    assert not np.array_equal(dense(left), dense(left + "!"))


def test_length_beyond_what_is_read_counts() -> None:
    reached = reached_steps("x" * 100_000)["num_chars"]
    assert reached == _num_steps("num_chars", 100_000) > reached_steps("x" * 10_000)["num_chars"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_char_features", 1000),
        ("num_word_features", -1),
        ("num_char_features", 2**21),
        ("min_char_ngram", 0),
        ("max_char_ngram", 2),
        ("max_word_ngram", 0),
        ("max_head_chars", 2**30),
        ("max_tail_chars", -1),
        ("statistic_scale", float("nan")),
    ],
)
def test_a_wrong_size_names_itself(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        FeatureConfig(**{field: value})
