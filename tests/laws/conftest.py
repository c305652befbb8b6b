"""The right answers that several laws compare with."""

import pytest

from tests.engines import tiny_pair
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import plainly


@pytest.fixture(scope="session")
def right() -> dict[str, list[int]]:
    """The mixed batch's answers on the tiny pair: plain decoding, each request alone."""
    answers = plainly(tiny_pair(), mixed_requests())
    assert all(len(set(tokens)) > 4 for tokens in answers.values())  # no model that loops
    return answers
