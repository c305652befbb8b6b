"""Repetitions of tests: fewer examples, seeds and prompts in `make test` than in the others."""

import os
from typing import Final

IS_QUICK: Final = os.environ.get("TEST_SIZE") == "quick"


def repeats(whole: int, quick: int) -> int:
    """Return how many examples, seeds or prompts a test tries."""
    return quick if IS_QUICK else whole
