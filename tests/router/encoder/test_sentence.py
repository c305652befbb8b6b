"""A sentence encoder: what it computes, which files it takes, what it does with odd texts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import BertModel

from outrider.router.encoder.bert import EncoderError, read_bert
from outrider.router.encoder.sentence import EncoderId, SentenceEncoder, encoder_for
from tests.router.encoder.encoders import write_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder.load(str(folder))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_embeddings_are_the_mean_of_a_layer_of_transformers(folder: Path, depth: int) -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 9]
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = states[depth][0].mean(dim=0).numpy()
    assert read_bert(folder, depth).embed(ids) == pytest.approx(expected, abs=5e-3)


def test_the_last_layer_is_left_out_and_weights_may_be_those_of_a_model_with_a_head(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "headed"
    other.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"bert.{name}": np.asarray(array, np.float16) for name, array in tensors.items()}
    save_file(renamed, other / "model.safetensors")
    encoder = SentenceEncoder.load(str(other))
    assert (encoder.id.depth, encoder.id.dimension) == (2, 16)
    expected = read_bert(folder, 2).embed([1, 2, 3])
    assert encoder.bert.embed([1, 2, 3]) == pytest.approx(expected, abs=2e-2)


def test_the_first_128_tokens_count_and_no_more(encoder: SentenceEncoder) -> None:
    begin = "what is the sum of a dog ? " * 16  # 128 words
    assert (encoder.embed(begin + "cat " * 50) == encoder.embed(begin)).all()
    assert (encoder.embed("cat " + begin) != encoder.embed(begin)).any()


@pytest.mark.parametrize(
    "text",
    ["a" * 100_000, "dog " * 25_000, "狗是什么?", "кот \ud800 dog", "def f(x):\n\treturn x", "\0"],
)
def test_any_text_has_a_finite_embedding(encoder: SentenceEncoder, text: str) -> None:
    found = encoder.embed(text)
    assert found.shape == (16,)
    assert np.isfinite(found).all()


def test_a_text_without_tokens_has_the_embedding_of_nothing(encoder: SentenceEncoder) -> None:
    assert (encoder.embed("") == 0.0).all()
    assert (encoder.embed("   \n") == 0.0).all()


def test_a_package_is_found_by_name_and_none_of_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_tiny_encoder"
    write_encoder(package / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    encoder = SentenceEncoder.load("my-tiny-encoder")
    assert encoder.id.source == "my-tiny-encoder"


def test_what_is_no_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="neither a folder nor an installed package"):
        SentenceEncoder.load("no-such-encoder")
    with pytest.raises(EncoderError, match="neither a folder"):
        SentenceEncoder.load("../..!")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(EncoderError, match="has no model"):
        SentenceEncoder.load(str(tmp_path))
    with pytest.raises(EncoderError, match=r"depth 4 is not in \[1, 3\]"):
        SentenceEncoder.load(str(folder), 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_size": 18}, "has shape"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
        ({"num_attention_heads": 3}, "do not fit"),
        ({"num_hidden_layers": 9}, "not a BERT-class encoder: 'encoder.layer.3"),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(EncoderError, match=why):
        read_bert(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_weights_in_bfloat16_are_refused_in_words(folder: Path, tmp_path: Path, kind: str) -> None:
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    why = {"bert": "save the encoder in float32 or float16", "llama": "model_type 'llama'"}[kind]
    with pytest.raises(EncoderError, match=why):
        read_bert(tmp_path)


def test_without_the_extra_its_name_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EncoderError, match=r'pip install "outrider\[encoder\]"'):
        SentenceEncoder.load(str(folder))


def test_a_routers_encoder_has_its_dimension_and_its_weights(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    wider = write_encoder(tmp_path / "wider", width=20)
    with pytest.raises(
        EncoderError, match="embeddings of 20 numbers, the router was trained with 16"
    ):
        encoder_for(encoder.id, str(wider))
    other = write_encoder(tmp_path / "other", seed=1)
    with pytest.raises(EncoderError, match="is not the one that the router was trained with"):
        encoder_for(encoder.id, str(other))
    same = write_encoder(tmp_path / "moved")
    gone = EncoderId(
        source="gone", fingerprint=encoder.id.fingerprint, dimension=16, depth=encoder.id.depth
    )
    assert encoder_for(gone, str(same)).embed("a dog").tolist() == encoder.embed("a dog").tolist()
