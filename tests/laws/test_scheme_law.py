"""Quantised models are targets of their own: nothing but their weights decides what they say."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks.shared.stored_checkpoints import store_quantised
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import DECODE, Decode, Rounding, SchemeName
from outrider.kernels.layers.row_invariant_linear import computes_in_panels
from outrider.kernels.triton_support import is_automatic
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    Pair,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
)
from tests.kernels.layers.bits import torch_threads

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
}
NUM_PROMPTS = 6


# "stored": the checkpoint itself has the bits.
Stored = Literal["stored int8", "stored int4"]
Kind = SchemeName | Stored
# Weights of the large model, and of the small one; None: plain.
Schemes = tuple[Kind | None, Kind | None]
EITHER: list[Schemes] = [("int8", None), (None, "int8"), ("int4", None), (None, "int4")]
BOTH: list[Schemes] = [("int8", "int8"), ("int4", "int4"), ("int4", "int8")]
STORED: list[Schemes] = [("stored int4", "stored int4"), ("stored int8", "stored int4")]


@cache
def stored_folder(tier: str, scheme: Stored) -> Path:
    """The pair's model with quantised weights, as a checkpoint of its own."""
    parent = Path(tempfile.mkdtemp(prefix="outrider-stored-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    store_quantised(PAIR_FOLDER / tier, parent / tier, 4 if scheme == "stored int4" else 8)
    return parent / tier


def stored_model(tier: str, scheme: Stored, rounding: Decode | None = None) -> DecoderModel:
    folder = str(stored_folder(tier, scheme))
    return DecoderModel.load(folder, dtype="bfloat16", deterministic=True, rounding=rounding)


@cache
def model(tier: str, scheme: Kind | None) -> DecoderModel:
    if scheme == "stored int4" or scheme == "stored int8":
        return stored_model(tier, scheme)
    return DecoderModel.load(
        str(PAIR_FOLDER / tier),
        dtype="auto",
        deterministic=True,
        rounding=None if scheme is None else Rounding(scheme=scheme),
    )


def engine(schemes: Schemes = (None, None), **options: Any) -> Engine:
    references = shipped_pair("bfloat16")
    pair = Pair(
        large=model("large", schemes[0]),
        small=model("small", schemes[1]),
        large_reference=references.large_reference,
        small_reference=references.small_reference,
    )
    return make_engine(pair, **options)


def answers(
    served: Engine, mode: str, *, speculation: bool, tier: str = "large", turn: str = ""
) -> dict[str, Answer]:
    requests = [
        make_request(
            f"{turn}{number}",
            prompt,
            tier=tier,
            max_tokens=32,
            seed=number,
            speculation=speculation,
            **SAMPLING[mode],
        )
        for number, prompt in enumerate(heldout_prompts(NUM_PROMPTS))
    ]
    return serve(served, requests)


def tokens(found: dict[str, Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in found.values()]


@cache
def plain_answers(large: Kind | None, mode: str) -> list[list[int]]:
    """What the large model says where nobody drafts."""
    return tokens(answers(engine((large, None)), mode, speculation=False))


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("schemes", EITHER + BOTH + STORED, ids=str)
def test_speculation_changes_no_answer_of_a_rounded_model(schemes: Schemes, mode: str) -> None:
    """Whoever drafts, and however roughly."""
    speculative = answers(engine(schemes), mode, speculation=True)
    assert tokens(speculative) == plain_answers(schemes[0], mode)
    assert sum(answer.stats.num_accepted_tokens for answer in speculative.values()) > 0


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("schemes", BOTH[:2] + STORED[:1], ids=str)
def test_neither_pre_emption_nor_cached_prefixes_change_an_answer(
    schemes: Schemes, mode: str
) -> None:
    plain = plain_answers(schemes[0], mode)
    tight = answers(engine(schemes, large_blocks=8), mode, speculation=True)
    assert tokens(tight) == plain
    assert sum(answer.stats.num_preemptions for answer in tight.values()) > 0
    warm = engine(schemes)
    answers(warm, mode, speculation=True)
    again = answers(warm, mode, speculation=True, turn="again-")
    assert tokens(again) == plain
    assert sum(event.num_cached_tokens for each in again.values() for event in each.prefills) > 0


@pytest.mark.parametrize("schemes", EITHER, ids=str)
def test_an_escalated_answer_is_the_other_tier_s_own(schemes: Schemes) -> None:
    plain = plain_answers(schemes[0], "sampled")
    served = engine(schemes)
    chunked = EngineConfig(max_tokens_per_step=48, min_prefill_tokens=1)

    def escalate(number: int, found: dict[str, Answer]) -> None:
        for name, answer in found.items():
            if len(answer.token_ids) >= 5 and not answer.switches:
                served.switch_tier(name, "large")

    requests = [
        make_request(
            str(number), prompt, tier="small", max_tokens=32, seed=number, **SAMPLING["sampled"]
        )
        for number, prompt in enumerate(heldout_prompts(NUM_PROMPTS))
    ]
    found = serve(served, requests, on_step=escalate)
    assert all(answer.switches for answer in found.values())
    assert tokens(found) == plain
    in_chunks = engine(schemes, config=chunked)
    assert tokens(answers(in_chunks, "sampled", speculation=True)) == plain


@pytest.mark.parametrize(("scheme", "share"), [("int8", 0.6), ("int4", 0.4)])
def test_rounding_is_seen_in_the_answers_and_in_the_fingerprint(
    scheme: SchemeName, share: float
) -> None:
    """The laws above are about other models than the ones in bfloat16."""
    rounded, plain = model("large", scheme), model("large", None)
    assert rounded.fingerprint == plain.fingerprint
    assert rounded.numerics != plain.numerics
    assert (rounded.scheme, plain.scheme) == (scheme, "bfloat16")
    assert rounded.weight_bytes < share * plain.weight_bytes
    assert rounded.num_parameters == plain.num_parameters


@pytest.mark.parametrize("scheme", ["stored int8", "stored int4"])
def test_a_stored_model_says_what_its_decoded_weights_say(scheme: Stored) -> None:
    """Whatever its products hold: in company of other batch sizes, on other numbers of threads."""
    stored, decoded = model("large", scheme), stored_model("large", scheme, DECODE)
    is_held = is_automatic() and computes_in_panels(torch.bfloat16, torch.device("cpu"))
    assert (stored.scheme == scheme) == is_held
    assert decoded.scheme == "bfloat16"
    references = shipped_pair("bfloat16")
    said = []
    for large, num_threads, together in ((stored, 2, 6), (stored, 1, 2), (decoded, 2, 6)):
        pair = Pair(
            large=large,
            small=model("small", None),
            large_reference=references.large_reference,
            small_reference=references.small_reference,
        )
        served = make_engine(pair, config=EngineConfig(max_sequences=together))
        with torch_threads(num_threads):
            said.append(tokens(answers(served, "sampled", speculation=True)))
    assert said[0] == said[1] == said[2]
