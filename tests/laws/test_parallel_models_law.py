"""Every kind of model says on several ranks what it says on one; heads and adapters with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.draft.heads.protocol import HeadKind
from outrider.engine.config import EngineConfig
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from outrider.kernels.triton_support import use_kernels
from tests.adapters import ALL_MODULES, adapter_ref, make_adapter
from tests.engines import (
    PAIR_FOLDER,
    make_request,
    random_prompt,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.heads import random_head_of, random_pair
from tests.laws.head_cases import accepted
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import (
    ON_DEVICE,
    UNDRAFTED,
    Way,
    assert_same_answers,
    by,
    plain_answers,
    plainly,
    serve_in,
    with_head,
)
from tests.laws.test_scheme_law import stored_folder
from tests.models import save_hf_model
from tests.ranks import parted, requests


@pytest.mark.slow
def test_a_head_on_rank_0_changes_no_text(tmp_path: Path) -> None:
    """Heads read the hidden states that all ranks have, and run on the first alone."""
    pair = random_pair()
    pair.large_reference.save_pretrained(tmp_path)
    kinds: tuple[HeadKind, ...] = ("eagle3", "dflash", "mtp", "peagle")
    with parted(tmp_path, 2, dtype="float32") as found:
        for kind in kinds:
            head = random_head_of(kind, found.model)
            drafted = with_head(head=head, has_small=kind == "mtp", on_device=kind == "peagle")
            vary = drafted | Way(make=found.head_engine)
            served = assert_same_answers(mixed_requests()[::2], of=pair, vary=vary)
            assert accepted(served.engine) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "count", "modules"),
    [
        ("qwen3", 4, ALL_MODULES),  # copied key-value heads
        pytest.param(  # fused projections
            *("phi3", 2, ("qkv_proj", "gate_up_proj", "down_proj")), marks=pytest.mark.long
        ),
    ],
)
def test_adapters_are_shared_out(
    architecture: str, count: int, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Each rank has its part of an adapter, also of one that comes back after it was put out."""
    pair = tiny_pair(architecture)
    base = pair.large_reference
    base.save_pretrained(tmp_path / "base")
    refs = [
        adapter_ref(make_adapter(tmp_path / f"a{seed}", base, seed=seed, modules=modules))
        for seed in (1, 2)
    ]
    asked = [
        replace(
            make_request(
                f"{turn}-{number}", random_prompt(9), seed=3, max_tokens=12, temperature=heat
            ),
            adapters=() if ref is None else (ref,),
        )
        for turn, heat in enumerate((0.0, 0.8))
        for number, ref in enumerate((*refs, None, refs[0]))
    ]
    right = plainly(pair, asked)
    assert len({tuple(right[f"0-{number}"]) for number in range(3)}) == 3
    with parted(tmp_path / "base", count, dtype="float32") as found:
        vary = by(config=EngineConfig(max_adapters=1)) | Way(make=found.engine)
        assert_same_answers(asked, of=pair, vary=vary)


KINDS = [
    # Pre-emption, and a vocabulary of 131 tokens.
    ("llama3", 2, {"large_blocks": 38, "block_size": 4, "on_device": True}),
    ("gpt-oss", 2, {"window_blocks": 120, "on_device": True}),  # stacked experts, sinks
    ("qwen2-moe", 2, {}),  # a shared expert
    pytest.param("qwen3-tied-mqa", 4, {}, marks=pytest.mark.long),  # one key-value head
    ("llama-biases", 2, {}),
    ("phi3", 2, {"window_blocks": 120}),  # fused projections
    pytest.param("cohere2", 2, {}, marks=pytest.mark.long),  # attention and MLP side by side
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "count", "options"), KINDS)
def test_every_kind_of_model_says_the_same(
    architecture: str, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    pair = tiny_pair(architecture)
    asked = mixed_requests()[4:]
    right = serve_in(UNDRAFTED, asked, pair).answers
    pair.large_reference.save_pretrained(tmp_path)
    with parted(tmp_path, count, dtype="float32") as found:
        vary = by(**options) | Way(make=found.engine)
        served = assert_same_answers(asked, of=pair, vary=vary, right=right)
    assert ("large_blocks" in options) == (served.total("num_preemptions") > 0)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_speculation_changes_no_answer_of_rounded_parts(scheme: SchemeName, tmp_path: Path) -> None:
    rounding = Rounding(scheme=scheme, keep_in=tmp_path)
    said = []
    for _ in range(1 + (scheme == "int4")):  # the second time with the weights that were kept
        with parted(PAIR_FOLDER / "large", 2, rounding=rounding, deterministic=True) as found:
            assert found.model.scheme == scheme
            vary, of = Way(make=found.engine), shipped_pair("bfloat16")
            right = serve_in(vary | UNDRAFTED, requests(), of).answers
            assert_same_answers(requests(), of=of, vary=vary, right=right)
            said.append(texts(right))
    assert said[0] == said[-1]


@pytest.mark.long
def test_speculation_changes_no_answer_of_rounded_experts(tmp_path: Path) -> None:
    """Each rank rounds its part of every expert, and of the one that all rows share."""
    save_hf_model(
        "qwen2-moe", tmp_path, vocab_size=131, num_hidden_layers=2, hidden_size=256,
        intermediate_size=512, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    )  # fmt: skip
    rounding = Rounding(scheme="int8", keep_in=None)
    with parted(tmp_path, 2, rounding=rounding, deterministic=True) as found:
        assert found.model.scheme == "int8"
        assert found.model.weight_bytes < 1.2 * found.model.num_parameters / 2
        vary = Way(make=found.engine)
        assert_same_answers(mixed_requests()[:6], vary=vary, like=vary | UNDRAFTED)


@pytest.mark.slow
def test_parts_of_stored_weights_have_the_decoded_weights_bits() -> None:
    folder, said = stored_folder("large", "stored int4"), []
    for rounding in (None, "decode"):
        options: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
        with parted(folder, 2, rounding=rounding, **options) as found:
            served = serve_in(Way(make=found.engine), requests(), shipped_pair("bfloat16"))
            said.append(texts(served.answers))
    assert said[0] == said[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
def test_a_gpus_passes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans on the device and Triton's kernels, interpreted, on both ranks."""
    pair = tiny_pair(num_layers=1)
    short = [
        make_request(str(number), random_prompt(5 + number), max_tokens=4, seed=number)
        for number in range(2)
    ]
    right = plain_answers(pair, short)
    pair.large_reference.save_pretrained(tmp_path)
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")  # for the other rank
    with use_kernels("triton"), parted(tmp_path, 2, dtype="float32") as found:
        vary = ON_DEVICE | Way(make=found.engine)
        assert_same_answers(short, of=pair, vary=vary, right=right)
