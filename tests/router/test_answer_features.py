import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.answer_features import (
    NUM_ANSWER_FEATURES,
    answer_features,
    answer_inputs,
    num_answer_inputs,
)

LOGPROBS = st.lists(st.floats(-20.0, 0.0), min_size=1, max_size=80)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_numbers_give_a_vector_of_one_size(logprobs: list[float], is_whole: bool) -> None:
    features = answer_features(logprobs, is_whole=is_whole)
    assert features.shape == (NUM_ANSWER_FEATURES,)
    assert np.isfinite(features).all()
    assert features[-1] == is_whole


@given(LOGPROBS)
def test_quantiles_are_those_of_numpy(logprobs: list[float]) -> None:
    surprise = np.sqrt(-np.array(logprobs))
    expected = np.quantile(surprise, [1.0, 0.95, 0.9, 0.75, 0.5])
    found = answer_features(logprobs, is_whole=False)
    assert found[:5] == pytest.approx(expected)
    assert found[5:10] == pytest.approx(expected**2)


@given(LOGPROBS, st.randoms())
def test_only_the_first_token_has_a_place(logprobs: list[float], rng: object) -> None:
    rest = logprobs[1:]
    rng.shuffle(rest)  # type: ignore[attr-defined]
    shuffled = answer_features([logprobs[0], *rest], is_whole=True)
    assert shuffled == pytest.approx(answer_features(logprobs, is_whole=True))


def test_features_match_a_count_by_hand() -> None:
    # Chances 0.95, 0.8, 0.6, 0.3 and 0.04: below 0.9, 0.7, 0.5, 0.25 and 0.05 lie 4, 3, 2, 1, 1.
    logprobs = [math.log(chance) for chance in (0.8, 0.95, 0.04, 0.6, 0.3)]
    features = answer_features(logprobs, is_whole=False)
    assert features[14:19] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    assert features[19:24] == pytest.approx(np.log1p([4, 3, 2, 1, 1]))
    assert features[24:40].tolist() == [1.0] * 4 + [0.0] * 12  # 5 tokens: at least 1, 2, 3, 4
    worst = [math.sqrt(-math.log(0.04)), math.sqrt(-math.log(0.3))]
    assert features[10] == pytest.approx(sum(worst) / 2)
    assert features[-2] == pytest.approx(math.sqrt(-math.log(0.8)))


def test_no_token_is_nothing_but_whole_or_not() -> None:
    assert not answer_features([], is_whole=False).any()
    assert answer_features([], is_whole=True).tolist() == [0.0] * (NUM_ANSWER_FEATURES - 1) + [1.0]


def test_bounds() -> None:
    low = answer_features([-math.inf, math.nan, -1e300], is_whole=False)
    assert np.array_equal(low, answer_features([-25.0] * 3, is_whole=False))
    high = answer_features([math.inf, 0.5], is_whole=False)
    assert np.array_equal(high, answer_features([0.0, 0.0], is_whole=False))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_inputs_are_logits_and_features_by_length_and_end(num_heads: int) -> None:
    logits = [0.5, -2.0][:num_heads]
    for is_whole in (False, True):
        features = answer_features([-0.1] * 8, is_whole=is_whole)
        inputs = answer_inputs(logits, features)
        assert inputs.shape == (num_answer_inputs(num_heads),)
        seen = [*logits, *features.tolist()]
        plain, by_length, by_end = np.split(inputs, 3)
        assert plain.tolist() == seen
        assert by_length == pytest.approx(np.array(seen) * 6 / 16)  # 1, 2, 3, 4, 6 and 8 tokens
        assert by_end == pytest.approx(np.array(seen) * is_whole)
