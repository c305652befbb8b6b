"""Recorded passes of every scheme say what launched ones do, and write to nothing of others'.

On a GPU they are CUDA graphs; without one, a stand-in that runs the pass again.
"""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.shared.stored_checkpoints import store_quantised
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised import scheme as schemes
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from tests.engine.passes.twins import Twin, make_twin, poison, random_pass, record_eagerly
from tests.gpu import DEVICE
from tests.models import save_hf_model

DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param(DEVICE.type, marks=pytest.mark.gpu, id="gpu"),
]
FP8 = torch.float8_e4m3fn
# Architecture or way of storing, scheme, type of the cache.
KINDS: list[tuple[str, SchemeName | None, torch.dtype | None]] = [
    ("qwen3", None, None),
    ("qwen3", "int8", None),
    ("qwen3", "int4", FP8),
    ("stored int4", None, None),
    ("stored int8", None, FP8),
    ("qwen3-moe", None, None),
    ("qwen3-moe", "int8", None),
    ("qwen3-moe", "int4", FP8),
]
# Sizes of the sequences of a pass, and how many of the last are trees: every bucket up to 32.
PASSES = [([1], 0), ([2], 1), ([3, 1], 0), ([8], 1), ([9, 4], 1), ([16, 8], 1), ([5, 11, 16], 2)]
SENTINEL = 0x5A


def load(name: str, scheme: SchemeName | None, device: str, folder: Path) -> DecoderModel:
    if name.startswith("stored"):
        save_hf_model("qwen3", folder / "plain")
        store_quantised(folder / "plain", folder / name, 4 if name == "stored int4" else 8)
    else:
        sizes = {"moe_intermediate_size": 64} if "moe" in name else {}
        save_hf_model(name, folder / name, **sizes)
    rounding = None if scheme is None else Rounding(scheme=scheme)
    return DecoderModel.load(str(folder / name), dtype="bfloat16", device=device, rounding=rounding)


def record(twin: Twin, device: str) -> None:
    """Record passes of up to 32 rows."""
    capture = record_eagerly if device == "cpu" else None
    assert twin.runner.capture_graphs(capture=capture, max_rows=32) >= 7


@pytest.mark.slow_cases
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "scheme", "kv_dtype"), KINDS)
def test_recorded_passes(
    name: str,
    scheme: SchemeName | None,
    kv_dtype: torch.dtype | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schemes, "MIN_ROUNDED_SIDE", 32)
    model = load(name, scheme, device, tmp_path)
    plain, recorded = (make_twin(model, kv_dtype=kv_dtype) for _ in range(2))
    record(recorded, device)
    # Memory that a recording gave back would be theirs now.
    sentinels = [
        torch.full((size,), SENTINEL, dtype=torch.uint8, device=device)
        for size in (64, 512, 4096, 65536)
        for _ in range(32)
    ]
    rng = random.Random(4)
    for sizes, num_trees in PASSES:
        pieces = random_pass(rng, vocab_size=131, sizes=sizes, num_trees=num_trees)
        expected = plain.run(pieces)
        poison(recorded.runner)
        found = recorded.run(pieces)
        assert found.logits.shape == expected.logits.shape
        if len(expected.logits):
            largest = float(expected.logits.abs().max())
            assert float((found.logits - expected.logits).abs().max()) < 0.04 * largest, sizes
        for twin in (plain, recorded):
            twin.advance(pieces)
    assert all(bool((each == SENTINEL).all()) for each in sentinels)
