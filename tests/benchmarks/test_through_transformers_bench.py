import pytest

from benchmarks.models.bench_through_transformers import (
    DRAFTED,
    NATIVE,
    PLAIN,
    THROUGH,
    gain_ratio,
    name_of,
)
from benchmarks.shared.turns import Turn, Turns


def test_a_gain_is_compared_with_the_gain_of_the_native_decoder() -> None:
    # Seconds of two questions of 10 tokens, twice each.
    seconds = {
        (NATIVE, PLAIN): [1.0, 3.0],
        (NATIVE, DRAFTED): [0.5, 0.5],  # 4 times as fast in all
        (THROUGH, PLAIN): [2.0, 4.0],
        (THROUGH, DRAFTED): [1.0, 2.0],  # twice as fast
    }
    by_case = {
        name_of(*case): [[Turn(token_ids=[1] * 10, wall_s=each)] * 2 for each in both]
        for case, both in seconds.items()
    }
    found = gain_ratio(Turns(by_case=by_case))
    assert found.estimate == pytest.approx(0.5)
    # Of the first question alone both gain 2, of the second alone the native one gains 6.
    assert found.low == pytest.approx(2 / 6)
    assert found.high == pytest.approx(1.0)
