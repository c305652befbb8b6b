"""Every request option, exact inside trees: the same tokens with speculation on and off.

Prompts x options on the bundled pair in float32. The right answers are plain decoding, each request
alone. They are compared with trees of the small model, alone and in one batch of all options under
pre-emption, with random trees, and, where greedy, with transformers' logits changed the slow way.
"""

from collections.abc import Sequence as SequenceOf
from functools import cache

import pytest
import torch

from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    assert_idle,
    chat_prompt,
    heldout_prompts,
    make_engine,
    make_request,
    scripted_drafter,
    serve,
    shipped_pair,
    texts,
)
from tests.laws.options import OPTIONS, changed_logits
from tests.laws.references import TIE, forced_logits

Prompts = SequenceOf[tuple[int, ...]]

NUM_PROMPTS = 200
PROMPTS_A_CHUNK = 10
VOCAB_SIZE = 2048
# Different sums of the same numbers.
LOGPROB_ERROR = 1e-4


def sample_prompts() -> Prompts:
    """One that leaves the pair helpless, so that sampling shows, and one that it knows well."""
    return chat_prompt("Tell me a long story about my uncle and his boat."), heldout_prompts(
        4, seed=6
    )[3]


def requests_of(prompts: Prompts, tier: Tier = "large") -> list[EngineRequest]:
    """Every prompt with every option; lengths differ, so that answers end inside trees."""
    return [
        make_request(
            f"{name}/{number}",
            prompt,
            tier=tier,
            max_tokens=19 + (7 * number + 5 * place) % 9,
            **{"seed": 100 * number + place, **OPTIONS[name]},
        )
        for number, prompt in enumerate(prompts)
        for place, name in enumerate(OPTIONS)
    ]


def alone(requests: list[EngineRequest], *, speculates: bool) -> dict[str, Answer]:
    engine = make_engine(shipped_pair(), speculates=speculates)
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= serve(engine, [request])
    accepted = engine.stats().num_accepted_tokens
    assert (accepted > 0) == (speculates and requests[0].tier == "large")
    return answers


@cache
def plainly(prompts: Prompts, tier: Tier) -> dict[str, Answer]:
    """The right answers."""
    return alone(requests_of(prompts, tier), speculates=False)


def assert_same(answers: dict[str, Answer], right: dict[str, Answer]) -> None:
    """Tokens, reasons and log-probabilities."""
    assert texts(answers) == texts(right)
    for name, answer in answers.items():
        assert answer.finish_reason == right[name].finish_reason
        assert len(answer.logprobs) == len(right[name].logprobs)
        for ours, theirs in zip(answer.logprobs, right[name].logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert abs(ours.logprob - theirs.logprob) < LOGPROB_ERROR
            assert len(ours.top) == len(theirs.top)
            for (_, one), (_, other) in zip(ours.top, theirs.top, strict=True):
                assert abs(one - other) < LOGPROB_ERROR


# ---- the laws, for any prompts ---------------------------------------------------------------


def check_trees_alone(prompts: Prompts) -> None:
    assert_same(alone(requests_of(prompts), speculates=True), plainly(prompts, "large"))


def check_one_batch(prompts: Prompts) -> None:
    """All options side by side, with too few blocks for all of them."""
    engine = make_engine(shipped_pair(), block_size=4, large_blocks=60, small_blocks=200)
    requests = requests_of(prompts)
    arrivals = {request.request_id: number // 8 for number, request in enumerate(requests)}
    answers = serve(engine, requests, arrivals=arrivals)
    assert_same(answers, plainly(prompts, "large"))
    assert engine.stats().tiers["large"].num_preemptions > 0
    assert engine.stats().num_accepted_tokens > 0
    assert_idle(engine)


def check_random_trees(prompts: Prompts, chance_right: float) -> None:
    right = plainly(prompts, "large")
    drafter = scripted_drafter(
        texts(right), chance_right=chance_right, vocab_size=VOCAB_SIZE, num_levels=5, branching=3
    )
    engine = make_engine(shipped_pair(), drafter=drafter, large_blocks=1024)
    assert_same(serve(engine, requests_of(prompts)), right)
    assert engine.stats().num_accepted_tokens > 0


@torch.inference_mode()
def check_reference(prompts: Prompts, tier: Tier = "large") -> None:
    """Greedy tokens are the best of transformers' logits after dense counts and biases.

    Log-probabilities are those of the logits before them.
    """
    pair = shipped_pair()
    reference = pair.large_reference if tier == "large" else pair.small_reference
    answers = plainly(prompts, tier)
    requests = [
        request
        for request in requests_of(prompts, tier)
        if request.sampling.is_greedy or request.sampling.num_logprobs is not None
    ]
    full = [[*r.prompt_token_ids, *answers[r.request_id].token_ids] for r in requests]
    for start in range(0, len(requests), 16):
        chosen = requests[start : start + 16]
        for request, logits in zip(
            chosen, forced_logits(reference, full[start : start + 16]), strict=True
        ):
            assert_reference(request, answers[request.request_id], logits)


def assert_reference(request: EngineRequest, answer: Answer, logits: torch.Tensor) -> None:
    """logits: [num_tokens, vocab_size] of prompt and answer."""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    emitted = answer.token_ids
    for place, token in enumerate(emitted):
        row = logits[len(prompt) - 1 + place]
        if sampling.is_greedy:
            changed = changed_logits(row.clone(), prompt, emitted[:place], sampling)
            gap = float(changed.max() - changed[token])
            assert gap < TIE, f"{request.request_id} at {place}: gap {gap}"
        if sampling.num_logprobs is not None:
            expected = row.log_softmax(-1)
            entry = answer.logprobs[place]
            assert entry.token_id == token
            assert abs(entry.logprob - float(expected[token])) < LOGPROB_ERROR
            best = expected.topk(sampling.num_logprobs).values.tolist()
            assert [number for _, number in entry.top] == pytest.approx(best, abs=LOGPROB_ERROR)
    is_stopped = emitted[-1] in sampling.stop_token_ids
    assert answer.finish_reason == ("stop" if is_stopped else "length")
    assert is_stopped or len(emitted) == sampling.max_tokens
    assert not set(emitted[:-1]) & set(sampling.stop_token_ids)
    assert len(emitted) >= min(sampling.min_tokens + is_stopped, sampling.max_tokens)


# ---- a sample --------------------------------------------------------------------------------


def test_trees_do_not_matter() -> None:
    check_trees_alone(sample_prompts())


def test_company_and_preemption_do_not_matter() -> None:
    check_one_batch(sample_prompts())


@pytest.mark.slow
def test_random_trees_do_not_matter() -> None:
    check_random_trees(sample_prompts(), chance_right=0.6)


@pytest.mark.parametrize("tier", ["large", "small"])
def test_greedy_tokens_and_logprobs_equal_the_reference(tier: Tier) -> None:
    check_reference(sample_prompts(), tier)


def test_small_answers_beside_large_ones() -> None:
    prompts = sample_prompts()
    small = requests_of(prompts, "small")
    large = [r for r in requests_of(prompts) if r.request_id.startswith("everything")]
    renamed = [
        make_request(
            f"large-{request.request_id}",
            request.prompt_token_ids,
            max_tokens=request.sampling.max_tokens,
            **{"seed": request.sampling.seed, **OPTIONS[request.request_id.split("/")[0]]},
        )
        for request in large
    ]
    right = plainly(prompts, "small") | {
        f"large-{request.request_id}": plainly(prompts, "large")[request.request_id]
        for request in large
    }
    assert_same(serve(make_engine(shipped_pair()), renamed + small), right)


def test_every_option_makes_a_difference() -> None:
    """Else the laws above would say nothing about it."""
    answers = texts(plainly(sample_prompts(), "large"))
    same_text = {"greedy", "logprobs"}
    for name in OPTIONS.keys() - same_text:
        # As far as the shortest limit of requests_of goes.
        changed = [
            answers[f"{name}/{number}"][:19] != answers[f"greedy/{number}"][:19]
            for number in range(2)
        ]
        assert any(changed), name
    shortened = [len(answers[f"stop-ids/{number}"]) for number in range(2)]
    lengthened = [len(answers[f"min-tokens/{number}"]) for number in range(2)]
    assert min(shortened) < 12 <= min(lengthened)


@pytest.mark.parametrize("name", ["everything", "everything-greedy", "min-tokens"])
def test_an_answer_that_starts_over_is_counted_anew(name: str) -> None:
    """A hand-over retracts the small answer: its tokens are not repeated ones any more."""
    prompt = sample_prompts()[1]
    fields = {"seed": 3, **OPTIONS[name]}
    request = make_request("r", prompt, tier="small", max_tokens=20, **fields)
    direct = make_request("r", prompt, max_tokens=20, **fields)
    expected = texts(serve(make_engine(shipped_pair(), speculates=False), [direct]))
    for at in (2, 5, 9):
        engine = make_engine(shipped_pair())

        def switch_tier(step: int, answers: dict[str, Answer], at: int = at) -> None:
            if step == at:
                engine.switch_tier("r", "large")  # noqa: B023 - called before the next turn

        answers = serve(engine, [request], on_step=switch_tier)
        assert answers["r"].switches
        assert texts(answers) == expected


# ---- all of it -------------------------------------------------------------------------------

CHUNKS = range(NUM_PROMPTS // PROMPTS_A_CHUNK)


@pytest.mark.long
@pytest.mark.parametrize("chunk", CHUNKS)
def test_two_hundred_prompts(chunk: int) -> None:
    start = chunk * PROMPTS_A_CHUNK
    prompts = heldout_prompts(NUM_PROMPTS)[start : start + PROMPTS_A_CHUNK]
    check_trees_alone(prompts)
    check_one_batch(prompts)
    check_random_trees(prompts, 0.6)
    check_reference(prompts)
    plainly.cache_clear()
