"""Quantised models are targets of their own: nothing but their weights decides what they say."""

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks.shared.stored_checkpoints import store_quantised
from outrider.engine.config import EngineConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import DECODE, EXACT, Rounding, SchemeName, StoredWay
from outrider.engine.request import EngineRequest
from outrider.kernels.layers.row_invariant_linear import computes_in_panels
from outrider.kernels.triton_support import is_automatic
from outrider.verifier.params import Tier
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    Pair,
    heldout_prompts,
    make_request,
    shipped_pair,
    texts,
)
from tests.kernels.layers.bits import torch_threads
from tests.laws.same_answers import (
    ACCEPTING,
    UNDRAFTED,
    Way,
    assert_same_answers,
    by,
    serve_in,
)

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


def stored_model(tier: str, scheme: Stored, rounding: StoredWay | None = None) -> DecoderModel:
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


@cache
def pair(schemes: Schemes) -> Pair:
    references = shipped_pair("bfloat16")
    return replace(references, large=model("large", schemes[0]), small=model("small", schemes[1]))


def requests_of(mode: str, *, tier: Tier = "large") -> list[EngineRequest]:
    return [
        make_request(
            str(number),
            prompt,
            tier=tier,
            max_tokens=32,
            seed=number,
            may_escalate=tier == "small",
            **SAMPLING[mode],
        )
        for number, prompt in enumerate(heldout_prompts(NUM_PROMPTS))
    ]


@cache
def plain_answers(large: Kind | None, mode: str) -> dict[str, Answer]:
    """What the large model says where nothing drafts."""
    return serve_in(UNDRAFTED, requests_of(mode), pair((large, None))).answers


def assert_same(schemes: Schemes, mode: str, vary: Way, *, tier: Tier = "large") -> None:
    """The answers are those that the large model gives without drafts, whatever drafts them."""
    requests, right = requests_of(mode, tier=tier), plain_answers(schemes[0], mode)
    assert_same_answers(requests, of=pair(schemes), vary=vary, right=right)


@pytest.mark.slow_cases
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("schemes", EITHER + BOTH + STORED, ids=str)
def test_speculation_changes_no_answer_of_a_rounded_model(schemes: Schemes, mode: str) -> None:
    """Whoever drafts, and however roughly."""
    assert_same(schemes, mode, ACCEPTING)


@pytest.mark.slow
@pytest.mark.parametrize("schemes", EITHER, ids=str)
def test_an_escalated_answer_is_the_other_tier_s_own(schemes: Schemes) -> None:
    assert_same(schemes, "sampled", Way(escalate=lambda _: 5), tier="small")
    chunks = EngineConfig(max_tokens_per_step=48, min_prefill_tokens=1)
    assert_same(schemes, "sampled", by(config=chunks))


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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["stored int8", "stored int4"])
def test_a_stored_model_says_what_its_decoded_weights_say(scheme: Stored) -> None:
    """Where rows are not rounded: in other company, on other numbers of threads."""
    stored, decoded = stored_model("large", scheme, EXACT), stored_model("large", scheme, DECODE)
    is_held = is_automatic() and computes_in_panels(torch.bfloat16, torch.device("cpu"))
    assert (stored.scheme == scheme) == is_held
    assert decoded.scheme == "bfloat16"
    both = pair((None, None))
    said = []
    for large, num_threads, together in ((stored, 2, 6), (stored, 1, 2), (decoded, 2, 6)):
        vary = by(config=EngineConfig(max_sequences=together))
        with torch_threads(num_threads):
            served = serve_in(vary, requests_of("sampled"), replace(both, large=large))
        said.append(texts(served.answers))
    assert said[0] == said[1] == said[2]
