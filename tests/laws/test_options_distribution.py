"""Under every sampling option, answers follow the target's own distribution (chi-square).

As in test_distribution.py: a model of seven tokens answers thousands of seeds, its trees are
drafted by a different one, and the joint counts of the second to the fourth token are compared with
exact probabilities. Those come from transformers' logits, changed by dense counts over each of the
400 contexts, and transformers' truncations.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.draft.config import DraftConfig
from outrider.verifier.logit_rules import LogitEdits, LogitRule, SamplingRule
from outrider.verifier.params import SamplingParams
from tests.engines import make_engine, make_request, serve
from tests.laws.chi_square import PROMPT, VOCAB_SIZE, p_value, strangers
from tests.laws.options import changed_logits
from tests.sizes import repeats

Options = dict[str, Any]

LEAST_P = 1e-3
NUM_SAMPLE = repeats(3000, 1500)
NUM_DRAWS = 20_000

SAMPLINGS: dict[str, Options] = {
    "cool": {"temperature": 0.8},
    "hot": {"temperature": 1.2},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.2, "top_p": 0.85},
    "min-p": {"temperature": 1.2, "min_p": 0.08},
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.8},
    "negative": {"temperature": 1.2, "frequency_penalty": -0.4, "presence_penalty": -0.3},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": ((2, 0.8), (4, -100.0), (6, -0.5))},
    "min-tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (0, 5)},
    "together": {
        "temperature": 1.1,
        "top_k": 6,
        "top_p": 0.97,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((1, 0.5),),
        "min_tokens": 3,
        "stop_token_ids": (5,),
    },
}
SAMPLE = ("presence", "repetition", "together")


def truncations(s: SamplingParams) -> LogitsProcessorList:
    steps = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0:
        steps.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(MinPLogitsWarper(s.min_p))
    return steps


@torch.inference_mode()
def exact_distribution(options: Options) -> NDArray[np.float64]:
    """P(second, third, fourth token), [7, 7, 7], by enumeration of all contexts."""
    sampling = SamplingParams(max_tokens=4, **options)
    steps = truncations(sampling)
    contexts = list(itertools.product(range(VOCAB_SIZE), repeat=3))
    batch = torch.tensor([[*PROMPT, *context] for context in contexts])
    logits = strangers().large_reference(batch).logits.float()[:, -4:]  # [343, 4, 7]
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}
    joint = np.zeros((VOCAB_SIZE,) * 4)
    for row, context in enumerate(contexts):
        chance = 1.0
        for length in range(4):
            before = context[:length]
            if before not in known:
                changed = changed_logits(
                    logits[row, length].clone(), list(PROMPT), list(before), sampling
                )
                cut = steps(torch.zeros(1, 1, dtype=torch.int64), changed[None])
                known[before] = cut.softmax(-1)[0].double().numpy()
            if length < 3:
                chance *= known[before][context[length]]
        joint[context] = chance * known[context]
    return joint.sum(0)


def draw(options: Options, num_seeds: int) -> tuple[NDArray[np.int64], float]:
    """Counts of (second, third, fourth token), and accepted nodes per seed."""
    engine = make_engine(
        strangers(),
        draft=DraftConfig(max_branching=2, max_frontier=2, max_draft_depth=3),
        large_blocks=128,
        small_blocks=128,
    )
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for start in range(0, num_seeds, 64):
        requests = [
            make_request(str(seed), PROMPT, max_tokens=4, seed=seed, **options)
            for seed in range(start, min(start + 64, num_seeds))
        ]
        for answer in serve(engine, requests).values():
            counts[tuple(answer.token_ids[1:])] += 1
    return counts, engine.stats().num_accepted_tokens / num_seeds


def check(name: str, num_seeds: int) -> None:
    drawn, accepted = draw(SAMPLINGS[name], num_seeds)
    assert accepted > 0.5  # trees, not plain decoding, made these sequences
    assert p_value(drawn, exact_distribution(SAMPLINGS[name])) > LEAST_P


@pytest.mark.parametrize("name", SAMPLE)
def test_answers_follow_the_changed_target(name: str) -> None:
    check(name, NUM_SAMPLE)


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLINGS)
def test_twenty_thousand_answers_follow_the_changed_target(name: str) -> None:
    check(name, NUM_DRAWS)


class _BlindToPaths(SamplingRule):
    """Counts the text and forgets what stands on the row's own path."""

    def collect(
        self, edits: LogitEdits, first_row: int, token_ids: list[int], paths: list[list[int]]
    ) -> None:
        super().collect(edits, first_row, token_ids, [[] for _ in paths])


def blind_rules(sampling: SamplingParams, *, num_prompt_tokens: int) -> list[LogitRule]:
    return [_BlindToPaths(sampling, num_prompt_tokens=num_prompt_tokens)]


@pytest.mark.slow
def test_penalties_that_forget_the_path_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.core.build_rules", blind_rules)
    drawn, _ = draw(SAMPLINGS["presence"], NUM_SAMPLE)
    assert p_value(drawn, exact_distribution(SAMPLINGS["presence"])) < LEAST_P
