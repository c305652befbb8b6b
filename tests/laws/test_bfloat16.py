"""In bfloat16 a batch decides ties: where answers part, the two tokens were that close."""

import pytest

from benchmarks.shared.compare import compare_answers, runner_logits
from outrider.engine.passes.runner import ModelRunner
from tests.engines import heldout_prompts, make_request, shipped_pair, texts
from tests.laws.same_answers import ALONE, AS_USUAL, UNDRAFTED, Way, serve_in
from tests.sizes import repeats

# A bfloat16 number has 8 significant bits: the shipped pair's logits, up to 32 in magnitude, are
# rounded to steps of 1/16 to 1/8, in each of its layers to as much relative precision. Two such
# steps of difference between ways to add up the same numbers are no defect; a wrong token of a
# broken cache is off by whole units.
LARGEST_GAP = 0.25


def greedy_answers(vary: Way, count: int) -> list[list[int]]:
    requests = [
        make_request(str(number), prompt, max_tokens=32)
        for number, prompt in enumerate(heldout_prompts(count))
    ]
    return [*texts(serve_in(vary, requests, shipped_pair("bfloat16")).answers).values()]


@pytest.mark.slow
def test_answers_part_only_where_two_tokens_are_nearly_tied() -> None:
    count = repeats(32, 16)
    prompts = heldout_prompts(count)
    plain = greedy_answers(ALONE | UNDRAFTED, count)
    exact_model = ModelRunner(model=shipped_pair().large, num_blocks=32)
    for at_a_time in (1, 16):
        speculative = greedy_answers(Way(at_a_time=at_a_time), count)
        comparison = compare_answers(
            prompts, plain, speculative, next_logits=runner_logits(exact_model)
        )
        print(f"{at_a_time} at a time: {comparison}")  # noqa: T201 - shown with pytest -rP
        assert comparison.num_equal >= 0.8 * count
        assert (comparison.largest_gap or 0.0) < LARGEST_GAP


def test_the_same_batch_gives_the_same_answer_twice() -> None:
    assert greedy_answers(AS_USUAL, 8) == greedy_answers(AS_USUAL, 8)
