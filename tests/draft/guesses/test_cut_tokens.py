"""What the drafter's truncation cuts is guessed behind what it keeps, and changes no text."""

from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from tests.engines import make_request, random_prompt
from tests.laws.same_answers import assert_same_answers, by

_DEPTH = 4
_CONFIG = DraftConfig(sources=("model",), max_draft_depth=_DEPTH, min_path_prob=1e-6)


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}])
def test_tokens_that_the_drafter_cuts_are_guessed_too(narrow: dict[str, Any]) -> None:
    """One token is left at each place: a tree of kept tokens would be a chain."""
    request = make_request("r", random_prompt(9), max_tokens=24, temperature=0.9, **narrow)
    answer = assert_same_answers([request], vary=by(draft=_CONFIG)).answers["r"]
    assert max(event.num_drafted_tokens for event in answer.emitted) > _DEPTH
