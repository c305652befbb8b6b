"""Repetitions of tests: fewer examples, seeds and prompts in `make test` than in the others."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pytest
import torch
from hypothesis import strategies as st

Size = TypeVar("Size")

IS_QUICK: Final = os.environ.get("TEST_SIZE") == "quick"


def repeats(whole: int, quick: int) -> int:
    """Return how many examples, seeds or prompts a test tries."""
    return quick if IS_QUICK else whole


def compiled_sizes(values: Iterable[Size], few: Sequence[Size]) -> st.SearchStrategy[Size]:
    """Draw what is a constant of a kernel: of few values on a GPU, where each is to be compiled."""
    return st.sampled_from(few if torch.cuda.is_available() else list(values))


def slow_but(names: set[str], kinds: Mapping[str, Any]) -> list[Any]:
    """Return a parameter for each kind; all but those named are slow."""
    return [
        pytest.param(kind, id=name, marks=() if name in names else pytest.mark.slow)
        for name, kind in kinds.items()
    ]
