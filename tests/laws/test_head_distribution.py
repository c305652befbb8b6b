"""Sampled answers follow the target's own distribution where a head drafts them: chi-square.

As in test_distribution.py, with heads of random weights over the same model: EAGLE-3, which can
guess five of the seven tokens, P-EAGLE and MTP.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from outrider.draft.config import DraftConfig
from outrider.draft.heads.protocol import HeadModel
from outrider.verifier.coupled import CoupledVerifier
from tests.draft.heads.head_files import (
    eagle3_weights,
    layer_fields,
    peagle_weights,
    specforge_config,
)
from tests.engines import make_request, random_prompt, serve
from tests.heads import knowing_pair, make_head_engine, mtp_of, read_written
from tests.laws.chi_square import (
    NARROW,
    VOCAB_SIZE,
    draw,
    exact_distribution,
    p_value,
    request_with,
    strangers,
)
from tests.laws.options import OPTIONS
from tests.laws.same_answers import total
from tests.laws.test_distribution import ALPHA, PLAIN, TRUNCATED, LenientVerifier
from tests.sizes import repeats

NUM_SEEDS = repeats(4000, 1200)
DRAFT = replace(NARROW, min_path_prob=0.0, sources=("head",))


@cache
def strange_head(kind: str) -> HeadModel:
    large, reference = strangers().large, strangers().large_reference
    if kind == "mtp":
        return read_written(*mtp_of(strangers().small_reference.model.layers[0], reference), large)
    weights = eagle3_weights(num_tokens=5)
    token_ids = torch.tensor([0, 1, 3, 4, 6])
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * reference.config.hidden_size].contiguous()
    weights["d2t"] = token_ids - torch.arange(5)
    weights["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, token_ids, True)
    layers = layer_fields(weights, vocab_size=VOCAB_SIZE)
    taps = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    config = specforge_config(weights) | layers | taps
    if kind == "peagle":
        config |= {"ptd_token_id": 2, "block_size": 3}
        weights["mask_hidden"] = peagle_weights()["mask_hidden"][
            ..., : weights["fc.weight"].shape[1]
        ]
        weights["mask_hidden"] = weights["mask_hidden"].contiguous()
    return read_written(weights, config, large)


def p_of_answers(kind: str, sampling: dict[str, float], verifier: CoupledVerifier) -> float:
    engine = make_head_engine(
        strangers(), strange_head(kind), draft=DRAFT, num_blocks=128, verifier=verifier
    )
    drawn = draw(engine, request_with(sampling), NUM_SEEDS)
    return p_value(drawn, exact_distribution(sampling))


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("eagle3", PLAIN),
        pytest.param("mtp", TRUNCATED, marks=pytest.mark.slow),
        pytest.param("peagle", PLAIN, marks=pytest.mark.slow),
    ],
)
def test_sequences_that_a_head_drafts_follow_the_target(
    kind: str, sampling: dict[str, float]
) -> None:
    assert p_of_answers(kind, sampling, CoupledVerifier()) > ALPHA


@pytest.mark.slow
def test_a_lenient_verifier_is_caught() -> None:
    assert p_of_answers("eagle3", PLAIN, LenientVerifier()) < ALPHA


@pytest.mark.slow_cases
@pytest.mark.parametrize("on_device", [False, True])
def test_a_head_that_knows_all_is_always_right(on_device: bool) -> None:
    """Guesses are ranked as the target chooses: with its noise, its limits and its penalties."""
    pair, head = knowing_pair()
    engine = make_head_engine(
        pair,
        head,
        on_device=on_device,
        draft=DraftConfig(sources=("head",), max_branching=1, max_draft_depth=4, min_path_prob=0.0),
    )
    requests = [
        make_request(
            name, random_prompt(9, seed=number), max_tokens=20, **{"seed": number, **options}
        )
        for number, (name, options) in enumerate(OPTIONS.items())
    ]
    answers = serve(engine, requests)
    assert total(answers, "num_drafted_tokens") > 14 * len(requests)
    assert total(answers, "num_accepted_tokens") == total(answers, "num_drafted_tokens")
