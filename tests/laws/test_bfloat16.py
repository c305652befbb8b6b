"""In bfloat16 a batch decides ties: where answers part, the two tokens were that close."""

from benchmarks.shared.compare import compare_answers, runner_logits
from outrider.engine.passes.runner import ModelRunner
from tests.engines import heldout_prompts, make_engine, make_request, serve, shipped_pair
from tests.sizes import repeats

# A bfloat16 number has 8 significant bits: the shipped pair's logits, up to 32 in magnitude, are
# rounded to steps of 1/16 to 1/8, in each of its layers to as much relative precision. Two such
# steps of difference between ways to add up the same numbers are no defect; a wrong token of a
# broken cache is off by whole units.
LARGEST_GAP = 0.25


def greedy_answers(*, speculation: bool, count: int, at_a_time: int) -> list[list[int]]:
    engine = make_engine(shipped_pair("bfloat16"))
    answers: list[list[int]] = []
    prompts = heldout_prompts(count)
    for start in range(0, count, at_a_time):
        requests = [
            make_request(str(number), prompts[number], max_tokens=32, speculation=speculation)
            for number in range(start, start + at_a_time)
        ]
        done = serve(engine, requests)
        answers.extend(done[request.request_id].token_ids for request in requests)
    return answers


def test_answers_part_only_where_two_tokens_are_nearly_tied() -> None:
    count = repeats(32, 16)
    prompts = heldout_prompts(count)
    plain = greedy_answers(speculation=False, count=count, at_a_time=1)
    exact_model = ModelRunner(model=shipped_pair().large, num_blocks=32)
    for at_a_time in (1, 16):
        speculative = greedy_answers(speculation=True, count=count, at_a_time=at_a_time)
        comparison = compare_answers(
            prompts, plain, speculative, next_logits=runner_logits(exact_model)
        )
        print(f"{at_a_time} at a time: {comparison}")  # noqa: T201 - shown with pytest -rP
        assert comparison.num_equal >= 0.8 * count
        assert (comparison.largest_gap or 0.0) < LARGEST_GAP


def test_the_same_batch_gives_the_same_answer_twice() -> None:
    first = greedy_answers(speculation=True, count=8, at_a_time=8)
    assert first == greedy_answers(speculation=True, count=8, at_a_time=8)
