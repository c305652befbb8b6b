import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.compare import compare_answers, first_difference, runner_logits
from outrider.engine.passes.runner import ModelRunner
from tests.engines import random_prompt, tiny_pair

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(TOKENS, TOKENS)
def test_first_difference_is_where_the_common_beginning_ends(
    left: list[int], right: list[int]
) -> None:
    position = first_difference(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def test_divergences_are_counted_and_carry_their_gap() -> None:
    seen: list[list[int]] = []

    def next_logits(token_ids: list[int]) -> torch.Tensor:
        seen.append(list(token_ids))
        return torch.tensor([0.0, 1.0, 3.5])

    comparison = compare_answers(
        [[9, 9], [8], [7]],
        [[0, 1, 2], [1, 1], [2]],
        [[0, 1, 1], [1, 1], [2, 2]],
        next_logits=next_logits,
    )
    assert comparison.num_equal == 1
    assert not comparison.is_equal
    assert [(d.index, d.position, d.logit_gap) for d in comparison.divergences] == [
        (0, 2, 2.5),
        (2, 1, None),  # one answer is the other's beginning: no second token to compare
    ]
    assert seen == [[9, 9, 0, 1]]
    assert str(comparison) == "1 of 3 equal, gap 2.5"


def test_answers_to_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_answers([[1]], [[1]], [[1], [2]])


def test_teacher_forcing_gives_transformers_logits_and_leaves_nothing_held() -> None:
    pair = tiny_pair()
    runner = ModelRunner(model=pair.large, num_blocks=16)
    prompt = random_prompt(37)
    logits = runner_logits(runner)(prompt)
    with torch.inference_mode():
        expected = pair.large_reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
    assert runner.pool.num_used == 0
