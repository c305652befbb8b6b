"""GGUF files compute what the same numbers compute from a folder, and bad ones are told."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.shared.gguf_files import kept, kind_of, write_gguf
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import fim_token_ids, sampling_defaults
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.gguf.folder import find_gguf, gguf_folder
from outrider.engine.model.gguf.header import TENSOR_TYPES, GgufHeader, read_header
from outrider.engine.model.gguf.tensors import GgufFile
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.model.read_config import read_model_config
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.models import make_hf_model

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
MODELS = {
    "llama2": "llama",
    "llama3": "llama",
    "llama-yarn": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


def no_tokenizer(header: GgufHeader, folder: Path) -> None:
    """The engine needs none."""


def folder_of(file: Path) -> Path:
    return gguf_folder(file, file.parent / "cache", add_tokenizer=no_tokenizer)


def logits(model: DecoderModel) -> Tensor:
    runner = ModelRunner(model=model, num_blocks=8, block_size=16)
    view = runner.new_view("")
    view.reserve(40)
    piece = ForwardSlice(view=view, token_ids=list(range(5, 45)), start_slot=0, num_logit_rows=40)
    return runner.forward([piece]).logits


def write_both(tmp_path: Path, name: str, kind: Kind) -> tuple[Path, Path]:
    """A model as a GGUF file, and as a folder with the numbers that the file keeps."""
    folder = tmp_path / "plain"
    hf_model = make_hf_model(name)
    hf_model.save_pretrained(folder)
    weights = {key: value.detach() for key, value in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    file = tmp_path / f"{name}.gguf"
    write_gguf(file, weights, read_model_config(folder), family=MODELS[name], kind=kind)
    left = {key: kept(value, kind_of(value, kind)) for key, value in weights.items()}
    save_file(left, folder / "model.safetensors")
    return file, folder


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", MODELS)
def test_a_file_computes_what_its_numbers_compute_in_a_folder(name: str, tmp_path: Path) -> None:
    file, plain = write_both(tmp_path, name, Kind.F32)
    model = DecoderModel.load(str(folder_of(file)), dtype="float32")
    expected = DecoderModel.load(str(plain), dtype="float32")
    assert torch.allclose(logits(model), logits(expected), atol=2e-5)
    assert model.num_parameters == expected.num_parameters
    assert model.config.eos_token_ids == expected.config.eos_token_ids
    assert model.config.model_id.endswith(name)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_number_is_decoded(kind: Kind, tmp_path: Path) -> None:
    file, plain = write_both(tmp_path, "qwen2", kind)
    done: list[tuple[int, int]] = []
    model = DecoderModel.load(
        str(folder_of(file)), dtype="float32", on_progress=lambda *each: done.append(each)
    )
    assert torch.equal(logits(model), logits(DecoderModel.load(str(plain), dtype="float32")))
    assert done == sorted(done)
    assert 0.8 < done[-2][0] / done[-2][1] <= 1.0


@pytest.mark.parametrize("kind", [k for k in TENSOR_TYPES if TENSOR_TYPES[k].block_numbers == 256])
def test_blocks_of_256_are_the_package_s(kind: int, tmp_path: Path) -> None:
    stored = TENSOR_TYPES[kind]
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (6, 3 * stored.block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("first", np.zeros(5, np.float32))
    writer.add_tensor("weight", blocks, raw_dtype=Kind(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, Kind(kind))
        found = GgufFile(tmp_path / "a.gguf").decoded("weight")
    assert found.shape == (6, 768)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_the_precision_is_what_the_numbers_are_worth(tmp_path: Path) -> None:
    for kind, dtype in ((Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.Q4_0, "bfloat16")):
        place = tmp_path / kind.name
        place.mkdir()
        file, _ = write_both(place, "qwen3", kind)
        assert read_model_config(folder_of(file)).dtype == dtype


def test_a_file_is_rounded_again_only_where_that_is_asked_for(tmp_path: Path) -> None:
    file, plain = write_both(tmp_path, "qwen2", Kind.Q8_0)
    rounding = Rounding(scheme="int4")
    rounded = DecoderModel.load(str(folder_of(file)), rounding=rounding)
    expected = DecoderModel.load(str(plain), rounding=rounding)
    assert rounded.scheme == "int4"
    assert torch.equal(logits(rounded), logits(expected))


def test_the_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    file, _ = write_both(tmp_path, "qwen2", Kind.F16)
    before = checkpoint_fingerprint(folder_of(file))
    assert before == checkpoint_fingerprint(folder_of(file))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert checkpoint_fingerprint(folder_of(file)) != before


# ---- which file -----------------------------------------------------------------------------


def test_a_path_means_a_file_or_the_only_one_of_a_folder(tmp_path: Path) -> None:
    assert find_gguf("Qwen/Qwen3-0.6B") is None
    assert find_gguf(str(tmp_path)) is None
    (tmp_path / "a.gguf").touch()
    assert find_gguf(str(tmp_path)) == find_gguf(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UnsupportedModelError, match=r"2 GGUF files: name one .*a\.gguf, b\.gguf"):
        find_gguf(str(tmp_path))
    assert find_gguf(str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(str(tmp_path)) is None


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path) -> None:
    file, _ = write_both(tmp_path, "qwen2", Kind.F32)
    first = folder_of(file)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')

    def never(*_: object) -> None:
        raise AssertionError("there is one")

    second = gguf_folder(file, tmp_path / "cache", add_tokenizer=never)
    assert second != first
    assert json.loads((second / "tokenizer.json").read_text()) == {"version": "1.0"}


# ---- bad files ------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def file_of(*parts: bytes, num_tensors: int = 0, num_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(parts)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin as a GGUF file"),
    "another format": (b"PK\x03\x04" * 10, "does not begin as a GGUF file"),
    "version 1": (file_of(version=1), "of version 1"),
    "big-endian": (file_of(version=3 << 24), "of version 50331648"),
    "many tensors": (file_of(num_tensors=HUGE), "tensors; at most 200000"),
    "many fields": (file_of(num_fields=HUGE), "fields; at most 10000"),
    "no fields": (file_of(num_fields=3), "cut short at byte 24"),
    "no name": (file_of(text("\0"), num_fields=1), "the name at byte 24 has characters"),
    "endless name": (file_of(struct.pack("<Q", HUGE), num_fields=1), "a text of 4611"),
    "unknown type": (
        file_of(text("a"), struct.pack("<I", 77), num_fields=1),
        "a is of type 77",
    ),
    "endless array": (
        file_of(text("a"), struct.pack("<IIQ", 9, 4, HUGE), num_fields=1),
        "the array a of 4611686018427387904 values is cut short",
    ),
    "many values": (  # an octet in the file is 36 of Python's
        file_of(text("a"), struct.pack("<IIQ", 9, 0, (1 << 22) + 1), bytes(1 << 23), num_fields=1),
        "its arrays have more than 4194304 values",
    ),
    "endless texts": (
        file_of(text("a"), struct.pack("<IIQ", 9, 8, 1 << 40), num_fields=1),
        "the array a of 1099511627776 values is cut short",
    ),
    "arrays in arrays": (
        file_of(text("a"), struct.pack("<IIQ", 9, 9, 1), num_fields=1),
        "the array a is of type 9",
    ),
    "alignment": (
        file_of(text("general.alignment"), struct.pack("<II", 4, 0), num_fields=1),
        "general.alignment is 0",
    ),
    "no dimensions": (file_of(tensor("t", (), 0), num_tensors=1), "t has 0 dimensions"),
    "empty tensor": (file_of(tensor("t", (4, 0), 0), num_tensors=1), "the tensor t has the shape"),
    "huge tensor": (file_of(tensor("t", (HUGE,), 0), num_tensors=1), "the tensor t has the shape"),
    "unknown numbers": (
        file_of(tensor("t", (32,), 99), num_tensors=1),
        "t is of type 99, which is not read; F32, F16, Q4_0",
    ),
    "indivisible": (
        file_of(tensor("t", (33, 2), 2), num_tensors=1),
        r"rows of 33 numbers, which blocks of 32 \(Q4_0\) do not divide",
    ),
    "cut short": (
        file_of(tensor("t", (1 << 30, 1 << 9), 0), num_tensors=1),
        "t ends at byte .*: it was cut short",
    ),
    "offset beyond": (
        file_of(tensor("t", (4,), 0, HUGE), num_tensors=1),
        "t ends at byte .*: it was cut short",
    ),
    "twice": (
        file_of(tensor("t", (1,), 0), tensor("t", (1,), 0), bytes(100), num_tensors=2),
        "two of its tensors have the same name",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_lies_is_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    data, reason = BAD[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(
        UnsupportedModelError, match=rf"bad\.gguf cannot be read as GGUF: .*{reason}"
    ):
        read_header(tmp_path / "bad.gguf")


def test_a_file_that_is_cut_anywhere_is_told(tmp_path: Path) -> None:
    file, _ = write_both(tmp_path, "qwen2", Kind.Q4_0)
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for length in [*range(0, 600, 7), *rng.integers(600, len(data) - 40, 60)]:
        file.write_bytes(data[:length])
        with pytest.raises(UnsupportedModelError, match="cannot be read as GGUF"):
            read_header(file)


def test_changed_bytes_end_in_one_sentence_or_none(tmp_path: Path) -> None:
    file, _ = write_both(tmp_path, "qwen2", Kind.Q4_0)
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    begin = min(each.first_byte for each in read_header(file).tensors.values())
    for _ in range(150):
        changed = bytearray(data)
        for place in rng.integers(0, begin, 4):
            changed[place] = rng.integers(256)
        file.write_bytes(changed)
        told = ""
        try:
            DecoderModel.load(str(folder_of(file)))
        except UnsupportedModelError as error:
            told = str(error)
        assert "\n" not in told


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"qwen2.expert_count": 4}, "mixtures of experts are not read from GGUF"),
        ({"qwen2.rope.dimension_count": 8}, "only a part of each head is rotated"),
        ({"qwen2.rope.scaling.type": "odd"}, "scaled as 'odd'"),
        ({"qwen2.embedding_length": "wide"}, "qwen2.embedding_length is wide, not a size"),
        ({"qwen2.attention.layer_norm_rms_epsilon": 1}, "epsilon is 1, not a number"),
        ({"qwen2.attention.head_count": 0}, "head_count is 0, not a size"),
    ],
)
def test_settings_that_are_not_read_are_told(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    hf_model = make_hf_model("qwen2")
    hf_model.save_pretrained(tmp_path / "plain")
    config = read_model_config(tmp_path / "plain")
    file = tmp_path / "odd.gguf"
    write_gguf(
        file,
        {"model.embed_tokens.weight": hf_model.get_input_embeddings().weight.detach()},  # type: ignore[operator]
        config,
        family="qwen2",
        kind=Kind.F32,
        fields=fields,
    )
    with pytest.raises(UnsupportedModelError, match=rf"odd\.gguf: .*{reason}"):
        folder_of(file)


def test_a_files_sampling_parameters_are_its_folders(tmp_path: Path) -> None:
    hf_model = make_hf_model("qwen2")
    hf_model.save_pretrained(tmp_path / "plain")
    file = tmp_path / "own.gguf"
    write_gguf(
        file,
        {key: value.detach() for key, value in hf_model.state_dict().items()},
        read_model_config(tmp_path / "plain"),
        family="qwen2",
        kind=Kind.F32,
        fields={"general.sampling.temp": 0.5, "general.sampling.top_k": 20},
    )
    assert sampling_defaults(folder_of(file)) == {"temperature": 0.5, "top_k": 20}


def test_a_files_tokens_for_text_in_the_middle_are_its_folders(tmp_path: Path) -> None:
    hf_model = make_hf_model("qwen2")
    hf_model.save_pretrained(tmp_path / "plain")
    named = {"fim_pre": 3, "fim_pad": 7, "suffix": 4, "middle": 5, "fim_mid": 6}
    file = tmp_path / "own.gguf"
    write_gguf(
        file,
        {key: value.detach() for key, value in hf_model.state_dict().items()},
        read_model_config(tmp_path / "plain"),
        family="qwen2",
        kind=Kind.F32,
        fields={f"tokenizer.ggml.{name}_token_id": token for name, token in named.items()},
    )
    assert fim_token_ids(folder_of(file)) == {"pre": 3, "suf": 4, "mid": 6, "pad": 7}
    assert fim_token_ids(tmp_path / "plain") == {}


def test_another_family_and_missing_tensors_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'rwkv7'; read are llama, qwen2, qwen3"):
        folder_of(tmp_path / "a.gguf")
