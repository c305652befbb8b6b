"""Models with recurrent layers answer alike with trees, checkpoints, pre-emption and escalation.

On random weights whose states last for 10 to 100 tokens, so that what a state says shows; the last
test sees to it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import outrider.engine.model.delta_net as delta_net
from outrider.draft.config import DraftConfig
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.config import EngineConfig
from outrider.verifier.params import TIERS
from tests import verification
from tests.engines import (
    Pair,
    make_engine,
    make_request,
    random_prompt,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.mixed import long_requests
from tests.laws.references import TIE, forced_logits
from tests.laws.same_answers import ACCEPTING, WARM, Way, assert_same_answers, by, plainly

# Prompts and answers around the 64 tokens between two states, and its multiples.
LENGTHS = (1, 40, 63, 64, 65, 120, 190)
# The longest answer needs 15 of these and no other answer does with it, so some are pre-empted.
BLOCKS = 26


requests_of = partial(long_requests, LENGTHS)


@pytest.fixture(scope="module")
def both() -> Pair:
    """Both tiers have recurrent layers."""
    return tiny_pair("qwen3_5", max_positions=256, drift=0.03)


def mixed_pair(large: str, small: str) -> Pair:
    first, second = (tiny_pair(name, max_positions=256, drift=0.03) for name in (large, small))
    return Pair(
        large=first.large,
        small=second.small,
        large_reference=first.large_reference,
        small_reference=second.small_reference,
    )


# Prompts are cut, trees are wide, and some are pre-empted.
PRESSED = by(
    large_blocks=BLOCKS,
    small_blocks=BLOCKS,
    draft=DraftConfig(max_branching=4),
    config=EngineConfig(max_tokens_per_step=96),
)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trees_chunks_preemption_and_checkpoints_change_nothing(
    both: Pair, on_device: bool
) -> None:
    vary = PRESSED | WARM | by(on_device=on_device) | ACCEPTING | Way(shows=("num_preemptions",))
    served = assert_same_answers(requests_of(), of=both, vary=vary)
    assert served.engine.stats().tiers["large"].prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("large", "small"), [("qwen3-next", "qwen3_5"), ("qwen3_5-moe", "qwen3"), ("qwen3", "qwen3_5")]
)
def test_either_tier_may_be_recurrent(large: str, small: str) -> None:
    pair = mixed_pair(large, small)
    for tier in TIERS:
        assert_same_answers(requests_of(tier=tier), of=pair, vary=PRESSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        RecurrentSizes(num_lines=2, num_checkpoints=0),
        RecurrentSizes(num_lines=3, num_checkpoints=1),
    ],
)
def test_few_lines_and_checkpoints_do_not_matter(both: Pair, sizes: RecurrentSizes) -> None:
    few = by(recurrent=sizes, large_blocks=256, small_blocks=256)
    assert_same_answers(requests_of()[4:], of=both, vary=PRESSED | few)


@pytest.mark.slow
def test_a_prefix_is_found_as_far_as_a_checkpoint(both: Pair) -> None:
    prompt = random_prompt(150, seed=1)
    first = make_request("first", prompt[:140], max_tokens=60)
    engine = make_engine(both)
    answer = serve(engine, [first])["first"].token_ids
    cases = {
        "same": (prompt[:140], 128),  # the end of the prompt
        "longer": (prompt, 128),
        "turn": ((*prompt[:140], *answer, 5, 6), 192),  # the end of the answer
        "shorter": (prompt[:70], 0),  # its boundary has no checkpoint
    }
    for name, (own, num_cached) in cases.items():
        again = make_request(name, own, max_tokens=20)
        found = serve(engine, [again])[name]
        assert found.prefills[0].num_cached_tokens == num_cached, name
        assert found.token_ids == plainly(both, [again])[name], name


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 3, 30, 70])
def test_an_escalated_answer_is_the_large_tiers(both: Pair, position: int) -> None:
    request = make_request(
        "one", random_prompt(100, seed=2), tier="small", max_tokens=90, may_escalate=True, seed=3
    )
    assert_same_answers([request], of=both, vary=Way(escalate=lambda _: position))


def largest_gap(reference: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]) -> float:
    """How far below transformers' best logit an answer's tokens are at most."""
    logits = forced_logits(reference, [[*prompt, *answer]])[0][len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.max(1).values - chosen).max())


@pytest.mark.slow
def test_greedy_answers_are_transformers_own(both: Pair) -> None:
    requests = [
        make_request(str(length), random_prompt(length, seed=length), max_tokens=80)
        for length in (30, 64, 150)
    ]
    for name, answer in texts(serve(make_engine(both), requests)).items():
        prompt = random_prompt(int(name), seed=int(name))
        assert largest_gap(both.large_reference, prompt, answer) < TIE


@pytest.mark.slow_cases
@pytest.mark.parametrize("part", ["fold_states", "delta_rows"])
def test_the_law_notices_states_that_say_nothing(
    both: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = getattr(delta_net, part)

    def forgetful(inputs: Any, rows: Any, states: Any, *rest: Any) -> None:
        real(inputs, rows, states.zero_(), *rest)

    replacement = forgetful if part == "delta_rows" else (lambda *_: None)
    long = [request for request in requests_of() if request.request_id.startswith("190")]
    right = plainly(both, long)
    monkeypatch.setattr(delta_net, part, replacement)
    monkeypatch.setattr(verification, "IS_ON", False)  # it would notice first
    assert texts(serve(make_engine(both), long)) != right
