"""Every request option, exact inside trees: the same tokens with speculation on and off.

Prompts x options on the bundled pair in float32. The right answers are plain decoding, each request
alone. They are compared with trees of the small model, alone and in one batch of all options under
pre-emption, with random trees, and, where greedy, with transformers' logits changed the slow way.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache

import pytest
import torch

from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    chat_prompt,
    heldout_prompts,
    make_request,
    scripted_drafter,
    shipped_pair,
    texts,
)
from tests.laws.options import OPTIONS, changed_logits
from tests.laws.references import TIE, forced_logits
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    Way,
    assert_same_answers,
    by,
    logprobs,
    serve_in,
)

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


@cache
def plainly(prompts: Prompts, tier: Tier) -> dict[str, Answer]:
    """The right answers."""
    requests = requests_of(prompts, tier)
    return serve_in(ALONE | by(speculates=False), requests, shipped_pair()).answers


def check(prompts: Prompts, vary: Way) -> None:
    """Tokens, reasons and log-probabilities are right, and guesses are accepted."""
    assert_same_answers(
        requests_of(prompts),
        of=shipped_pair(),
        vary=ACCEPTING | vary,
        right=plainly(prompts, "large"),
        within=logprobs(LOGPROB_ERROR),
    )


# ---- the laws, for any prompts ---------------------------------------------------------------


def check_one_batch(prompts: Prompts) -> None:
    """All options side by side, with too few blocks for all of them."""
    few = by(block_size=4, large_blocks=60, small_blocks=200)
    check(prompts, few | Way(arrive=lambda number: number // 8, shows=("num_preemptions",)))


def check_random_trees(prompts: Prompts, chance_right: float) -> None:
    drafter = scripted_drafter(
        texts(plainly(prompts, "large")),
        chance_right=chance_right,
        vocab_size=VOCAB_SIZE,
        num_levels=5,
        branching=3,
    )
    check(prompts, by(drafter=drafter, large_blocks=1024))


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
    check(sample_prompts(), ALONE)


@pytest.mark.slow
def test_company_and_preemption_do_not_matter() -> None:
    check_one_batch(sample_prompts())


@pytest.mark.slow
def test_random_trees_do_not_matter() -> None:
    check_random_trees(sample_prompts(), chance_right=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["large", "small"])
def test_greedy_tokens_and_logprobs_equal_the_reference(tier: Tier) -> None:
    check_reference(sample_prompts(), tier)


@pytest.mark.slow
def test_small_answers_beside_large_ones() -> None:
    prompts = sample_prompts()
    large = [
        replace(request, request_id=f"large-{request.request_id}")
        for request in requests_of(prompts)
        if request.request_id.startswith("everything")
    ]
    own = plainly(prompts, "large").items()
    right = plainly(prompts, "small") | {f"large-{name}": answer for name, answer in own}
    assert_same_answers(
        large + requests_of(prompts, "small"),
        of=shipped_pair(),
        right=right,
        within=logprobs(LOGPROB_ERROR),
    )


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


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["everything", "everything-greedy", "min-tokens"])
@pytest.mark.parametrize("at", [2, 5, 9])
def test_an_answer_that_starts_over_is_counted_anew(name: str, at: int) -> None:
    """A hand-over retracts the small answer: its tokens are not repeated ones any more."""
    fields = {"seed": 3, **OPTIONS[name]}
    prompt = sample_prompts()[1]
    request = make_request("r", prompt, tier="small", max_tokens=20, may_escalate=True, **fields)
    vary = Way(escalate=lambda _: at)
    assert assert_same_answers([request], of=shipped_pair(), vary=vary).answers["r"].switches


# ---- all of it -------------------------------------------------------------------------------

CHUNKS = range(NUM_PROMPTS // PROMPTS_A_CHUNK)


@pytest.mark.long
@pytest.mark.parametrize("chunk", CHUNKS)
def test_two_hundred_prompts(chunk: int) -> None:
    start = chunk * PROMPTS_A_CHUNK
    prompts = heldout_prompts(NUM_PROMPTS)[start : start + PROMPTS_A_CHUNK]
    check(prompts, ALONE)
    check_one_batch(prompts)
    check_random_trees(prompts, 0.6)
    check_reference(prompts)
    plainly.cache_clear()
