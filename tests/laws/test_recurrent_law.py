"""Models with recurrent layers answer alike with trees, checkpoints, pre-emption and escalation.

On random weights whose states last for 10 to 100 tokens, so that what a state says shows; the last
test sees to it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import outrider.engine.model.delta_net as delta_net
from outrider.draft.config import DraftConfig
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    Pair,
    assert_idle,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
)
from tests.laws.mixed import plainly
from tests.laws.references import TIE, forced_logits

# Prompts and answers around the 64 tokens between two states, and its multiples.
LENGTHS = (1, 40, 63, 64, 65, 120, 190)
MAX_TOKENS = 40
# The longest answer needs 15 of these and no other answer does with it, so some are pre-empted.
BLOCKS = 26


def requests_of(*, max_tokens: int = MAX_TOKENS, tier: Tier = "large") -> list[EngineRequest]:
    """Two of each length, the second one longer by a few tokens; half of the texts are sampled."""
    return [
        make_request(
            f"{length}-{more}",
            random_prompt(220, seed=length)[: length + 9 * more],
            max_tokens=max_tokens,
            tier=tier,
            temperature=0.8 * (length % 2),
            seed=length,
        )
        for length in LENGTHS
        for more in (0, 1)
    ]


@pytest.fixture(scope="module")
def both() -> Pair:
    """Both tiers have recurrent layers."""
    return tiny_pair("qwen3_5", max_positions=256, drift=0.03)


@pytest.fixture(scope="module")
def right(both: Pair) -> dict[str, list[int]]:
    return plainly(both, requests_of())


def mixed_pair(large: str, small: str) -> Pair:
    first, second = (tiny_pair(name, max_positions=256, drift=0.03) for name in (large, small))
    return Pair(
        large=first.large,
        small=second.small,
        large_reference=first.large_reference,
        small_reference=second.small_reference,
    )


def pressed(pair: Pair, **options: Any) -> Engine:
    """An engine that pre-empts, cuts prompts and drafts wide trees."""
    settings: dict[str, Any] = {
        "large_blocks": BLOCKS,
        "small_blocks": BLOCKS,
        "draft": DraftConfig(max_branching=4),
        "config": EngineConfig(max_tokens_per_step=96),
    }
    return make_engine(pair, **{**settings, **options})


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trees_chunks_preemption_and_checkpoints_change_nothing(
    both: Pair, right: dict[str, list[int]], on_device: bool
) -> None:
    engine = pressed(both, on_device=on_device)
    for _ in range(2):  # the second time with prefixes from the cache
        assert texts(serve(engine, requests_of())) == right
    stats = engine.stats().tiers["large"]
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert engine.stats().num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("large", "small"), [("qwen3-next", "qwen3_5"), ("qwen3_5-moe", "qwen3"), ("qwen3", "qwen3_5")]
)
def test_either_tier_may_be_recurrent(large: str, small: str) -> None:
    pair = mixed_pair(large, small)
    assert texts(serve(pressed(pair), requests_of())) == plainly(pair, requests_of())
    engine = pressed(pair)
    of_small = requests_of(tier="small")
    assert texts(serve(engine, of_small)) == plainly(pair, of_small)
    assert_idle(engine)


@pytest.mark.parametrize(
    "sizes",
    [
        RecurrentSizes(num_lines=2, num_checkpoints=0),
        RecurrentSizes(num_lines=3, num_checkpoints=1),
    ],
)
def test_few_lines_and_checkpoints_do_not_matter(
    both: Pair, right: dict[str, list[int]], sizes: RecurrentSizes
) -> None:
    engine = pressed(both, recurrent=sizes, large_blocks=256, small_blocks=256)
    assert texts(serve(engine, requests_of()[4:])) == {
        name: right[name] for name in list(right)[4:]
    }
    assert_idle(engine)


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


@pytest.mark.parametrize("position", [0, 3, 30, 70])
def test_an_escalated_answer_is_the_large_tiers(both: Pair, position: int) -> None:
    request = make_request(
        "one", random_prompt(100, seed=2), tier="small", max_tokens=90, may_escalate=True, seed=3
    )
    own = plainly(both, [replace(request, tier="large", may_escalate=False)])
    engine = make_engine(both)
    answers = {"one": Answer()}
    engine.submit(request)
    while not answers["one"].finished:
        if len(answers["one"].token_ids) >= position and not answers["one"].switches:
            engine.switch_tier("one", "large")
        step_once(engine, answers)
    assert texts(answers) == own
    assert_idle(engine)


def largest_gap(reference: PreTrainedModel, prompt: tuple[int, ...], answer: list[int]) -> float:
    """How far below transformers' best logit an answer's tokens are at most."""
    logits = forced_logits(reference, [[*prompt, *answer]])[0][len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.max(1).values - chosen).max())


def test_greedy_answers_are_transformers_own(both: Pair) -> None:
    requests = [
        make_request(str(length), random_prompt(length, seed=length), max_tokens=80)
        for length in (30, 64, 150)
    ]
    for name, answer in texts(serve(make_engine(both), requests)).items():
        prompt = random_prompt(int(name), seed=int(name))
        assert largest_gap(both.large_reference, prompt, answer) < TIE


@pytest.mark.parametrize("part", ["fold_states", "delta_rows"])
def test_the_law_notices_states_that_say_nothing(
    both: Pair, right: dict[str, list[int]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = getattr(delta_net, part)

    def forgetful(inputs: Any, rows: Any, states: Any, *rest: Any) -> None:
        real(inputs, rows, states.zero_(), *rest)

    replacement = forgetful if part == "delta_rows" else (lambda *_: None)
    monkeypatch.setattr(delta_net, part, replacement)
    long = [request for request in requests_of() if request.request_id.startswith("190")]
    found = texts(serve(make_engine(both), long))
    assert found != {name: right[name] for name in found}
