"""Portable numerics: one function on every instruction set, and one text.

What torch's own operations of older processors make of it, and ARM, is in
`tests/kernels/cpu/emulated/`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.load import load_model
from outrider.kernels.cpu.product_library import InstructionSet, compute_portably, product_support
from tests.engines import PAIR_FOLDER, shipped_pair, texts
from tests.grammars import shipped_compiler
from tests.kernels.layers.bits import same_bits
from tests.laws.matrix import AXES, pair_of, requests_of
from tests.laws.same_answers import ACCEPTING, by, serve_in
from tests.laws.test_deterministic import Passes, a_tree, prompts
from tests.models import save_hf_model

Found = tuple[str, dict[str, list[int]], Tensor]


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Numerics are portable, and models are loaded anew."""
    if product_support().library is None:
        pytest.skip("portable numerics need the compiled products")
    monkeypatch.setenv("OUTRIDER_NUMERICS", "")  # what it was comes back
    compute_portably()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Look at the environment again."""
    for each in (product_support, pair_of, shipped_pair):
        each.cache_clear()


def words() -> list[str]:
    """The instruction sets of this processor that portable numerics take, for OUTRIDER_CPU."""
    library = product_support().library
    assert library is not None
    own = (InstructionSet.AVX512, InstructionSet.NEON_BF16)
    return [
        each.name.lower().replace("_", "-")
        for each in sorted(library.instruction_sets)
        if each not in own
    ]


def found_by(weights: str) -> Found:
    """The large model's fingerprint, answers, and logits of passes of many shapes."""
    case = {axis: values[0] for axis, values in AXES.items()}
    requests = requests_of(case | {"batch": "8", "sampling": "both", "grammar": "schema"})
    grammars = {"large": shipped_compiler(), "small": shipped_compiler()}
    large = pair_of(weights).large
    assert isinstance(large, DecoderModel)
    said = texts(serve_in(ACCEPTING | by(grammars=grammars), requests, pair_of(weights)).answers)
    passes, sequences = Passes(large), prompts(6)
    together = passes.run(*(passes.slice(each) for each in sequences))
    tree = passes.in_a_tree(sequences[3], *a_tree(20))
    return large.numerics, said, torch.cat([together, tree])


@pytest.mark.slow
@pytest.mark.parametrize("weights", AXES["weights"])
def test_every_instruction_set_gives_the_same_bits_and_answers(
    weights: str, portable: pytest.MonkeyPatch
) -> None:
    found: list[Found] = []
    for word in words():
        portable.setenv("OUTRIDER_CPU", word)
        forget()
        found.append(found_by(weights))
    for numerics, said, logits in found:
        assert (numerics, said) == found[0][:2]
        assert same_bits(logits, found[0][2])


@pytest.mark.slow
def test_ordinary_numerics_do_not_promise_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor multiplies bfloat16 by itself, it has other bits, and says so."""
    if product_support().instruction_set not in (InstructionSet.AVX512, InstructionSet.NEON_BF16):
        pytest.skip("this processor has no products of bfloat16 of its own")
    forget()
    own = found_by("bfloat16")
    monkeypatch.setenv("OUTRIDER_CPU", words()[0])
    forget()
    other = found_by("bfloat16")
    monkeypatch.undo()
    forget()
    assert own[0] != other[0]
    assert not same_bits(own[2], other[2])


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma2", "qwen3_moe"])
def test_a_model_with_parts_of_torch_s_is_refused(
    architecture: str, portable: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_hf_model(architecture, tmp_path)
    with pytest.raises(UnsupportedModelError, match="--numerics portable cannot hold"):
        load_model(str(tmp_path), dtype="bfloat16")


def test_another_precision_is_refused(portable: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="its numbers are not bfloat16"):
        load_model(str(PAIR_FOLDER / "small"), dtype="float32")
