"""Under every sampling option, answers follow the target's own distribution (chi-square).

As in test_distribution.py: a model of seven tokens answers thousands of seeds, its trees are
drafted by a different one, and the joint counts of the second to the fourth token are compared with
exact probabilities. Those come from transformers' logits, changed by dense counts over each of the
400 contexts, and transformers' truncations.
"""

import pytest

from outrider.verifier.logit_rules import LogitEdits, LogitRule, SamplingRule
from outrider.verifier.params import SamplingParams
from tests.laws.chi_square import Options, drafting, draw, exact_distribution, p_value, request_with
from tests.sizes import repeats

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


def check(name: str, num_seeds: int) -> None:
    drawn = draw(drafting(), request_with(SAMPLINGS[name]), num_seeds)
    assert p_value(drawn, exact_distribution(SAMPLINGS[name])) > LEAST_P


@pytest.mark.slow_cases
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
    drawn = draw(drafting(), request_with(SAMPLINGS["presence"]), NUM_SAMPLE)
    assert p_value(drawn, exact_distribution(SAMPLINGS["presence"])) < LEAST_P
