"""Rounded weights on disk: the second start reads them, and nothing wrong is ever believed."""

import logging
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised import scheme
from outrider.engine.model.quantised.formats import SCHEMES, Rounding, SchemeName
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.engines import PAIR_FOLDER
from tests.models import make_hf_model

LARGE, SMALL = str(PAIR_FOLDER / "large"), str(PAIR_FOLDER / "small")


def load(folder: Path, path: str = LARGE, scheme: SchemeName = "int8") -> DecoderModel:
    return DecoderModel.load(path, rounding=Rounding(scheme=scheme, keep_in=folder))


def logits(model: DecoderModel) -> Tensor:
    runner = ModelRunner(model=model, num_blocks=8, block_size=16)
    view = runner.new_view("")
    view.reserve(12)
    piece = ForwardSlice(view=view, token_ids=list(range(5, 17)), start_slot=0, num_logit_rows=12)
    return runner.forward([piece]).logits


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def never(*_: object) -> None:
    raise AssertionError("the weights were rounded again")


@pytest.mark.slow_cases
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_the_second_load_rounds_nothing_and_computes_the_same(
    scheme_name: SchemeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(tmp_path, scheme=scheme_name)
    assert len(files(tmp_path)) == first.config.num_layers + 1
    monkeypatch.setattr(scheme, "rounded_to_int8", never)
    monkeypatch.setattr(scheme, "rounded_to_int4", never)
    done: list[tuple[int, int]] = []
    second = DecoderModel.load(
        LARGE,
        rounding=Rounding(scheme=scheme_name, keep_in=tmp_path),
        on_progress=lambda *progress: done.append(progress),
    )
    assert torch.equal(logits(first), logits(second))
    assert second.num_parameters == first.num_parameters
    assert second.weight_bytes == first.weight_bytes
    assert len(done) > 10
    assert done[-1][0] == done[-1][1]


class Damage(NamedTuple):
    """A way to spoil a file, and the reason that the log gives."""

    name: str
    reason: str


def spoil(place: Path, name: str) -> None:
    data = bytearray(place.read_bytes())
    if name == "cut short":
        place.write_bytes(data[: len(data) // 2])
    elif name == "one bit":
        data[-100] ^= 1
        place.write_bytes(data)
    elif name == "emptied":
        place.write_bytes(b"")
    elif name == "another version":
        place.write_bytes(re.sub(rb'"version":"\d+"', b'"version":"0"', bytes(data)))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "damage",
    [
        Damage("cut short", "header"),
        Damage("one bit", "damaged"),
        Damage("emptied", "header"),
        Damage("another version", "another checkpoint's, or another scheme's"),
    ],
    ids=lambda damage: damage.name,
)
def test_a_spoilt_file_is_told_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    expected = logits(load(tmp_path))
    place = files(tmp_path)[1]
    spoil(place, damage.name)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(tmp_path)), expected)
    (told,) = caplog.messages
    assert str(place) in told
    assert damage.reason in told
    caplog.clear()
    load(tmp_path)
    assert caplog.messages == []  # it was written anew


def test_weights_of_another_checkpoint_are_not_taken(tmp_path: Path) -> None:
    load(tmp_path)
    (kept,) = tmp_path.iterdir()
    other = tmp_path / "checkpoint"
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    make_hf_model("llama3", seed=3, **wide).to(torch.bfloat16).save_pretrained(other)
    expected = logits(DecoderModel.load(str(other), rounding=Rounding(scheme="int8")))
    load(tmp_path, str(other))
    (own,) = set(tmp_path.iterdir()) - {kept, other}
    for file in files(own):  # as if somebody had copied them
        if (kept / file.name).is_file():
            shutil.copy(kept / file.name, file)
    assert torch.equal(logits(load(tmp_path, str(other))), expected)


def test_a_start_needs_no_folder_that_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "file")
    (told,) = caplog.messages
    assert "not kept" in told
    assert model.scheme == "int8"


def test_a_full_disk_ends_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=1 << 20))
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    (told,) = caplog.messages
    assert "no room" in told
    assert files(tmp_path) == []


def test_another_type_of_activations_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"computed with in bfloat16, not in float32"):
        load_model(LARGE, dtype="float32", rounding=Rounding(scheme="int8"))


def test_a_width_that_no_group_divides_has_8_bits_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"hidden_size": 272, "intermediate_size": 272, "head_dim": 64}
    make_hf_model("llama3", **config).to(torch.bfloat16).save_pretrained(tmp_path / "odd")
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "kept", str(tmp_path / "odd"), scheme="int4")
    (told,) = caplog.messages
    assert "have 8 bits, not 4: groups of 32 do not divide their columns" in told
    assert "model.layers.0.self_attn.q_proj.weight" in told
    assert model.scheme == "int4"
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_narrow_weights_stay_as_they_are(
    scheme_name: SchemeName, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = DecoderModel.load(SMALL, dtype="bfloat16", deterministic=True)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, SMALL, scheme_name)
    assert any("have a side below 256" in told for told in caplog.messages)
    assert torch.equal(logits(model), logits(plain))
    assert files(tmp_path) == []
    assert (model.weight_bytes, model.num_parameters) == (plain.weight_bytes, plain.num_parameters)
    assert (model.scheme, model.numerics == plain.numerics) == (scheme_name, False)
