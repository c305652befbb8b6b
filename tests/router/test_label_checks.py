from dataclasses import replace

import numpy as np
import pytest

from outrider.router.dataset import LabelledPrompts
from outrider.router.label_checks import label_complaints
from tests.router.conftest import labelled_answers


@pytest.fixture(scope="module")
def honest() -> LabelledPrompts:
    return labelled_answers(300, seed=3)


def test_honest_labels_pass(honest: LabelledPrompts) -> None:
    assert label_complaints(honest) == []
    assert label_complaints(replace(honest, strong=None, logprobs=None)) == []


def test_a_small_model_that_beats_the_large_one_is_named(honest: LabelledPrompts) -> None:
    assert honest.strong is not None
    (complaint,) = label_complaints(
        replace(honest, weak=honest.strong, strong=honest.weak, logprobs=None)
    )
    assert "the small model beats the large one" in complaint


def test_confidence_that_runs_against_the_labels_is_named(honest: LabelledPrompts) -> None:
    (complaint,) = label_complaints(replace(honest, weak=1.0 - honest.weak))
    assert "confidence runs against weak_correct" in complaint


def test_chance_alone_is_no_poison(honest: LabelledPrompts) -> None:
    rng = np.random.default_rng(0)
    coins = (rng.random((2, 300)) < 0.5).astype(np.float64)
    assert label_complaints(replace(honest, weak=coins[0], strong=coins[1])) == []
    few = LabelledPrompts(prompts=["a"], weak=np.ones(1), strong=np.zeros(1), sha256="")
    assert label_complaints(few) == []
    same = replace(honest, weak=np.ones(300), strong=np.ones(300))
    assert label_complaints(same) == []
    empty = replace(honest, logprobs=[np.zeros(0)] * 300)
    assert label_complaints(empty) == []
