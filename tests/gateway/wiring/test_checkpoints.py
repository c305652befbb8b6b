"""GGUF files as tiers: their tokenizer, template and weights are those of the checkpoint."""

import asyncio
import sys
from pathlib import Path

import pytest

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.gguf.folder import LINK
from outrider.engine.model.gguf.header import read_header
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.gguf_tokenizer import write_tokenizer
from outrider.gateway.contract.schema.chat import InputMessage
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.wiring.checkpoints import checkpoint, named_models
from tests.gateway.upstream.write_gguf import main as write_gguf

SMALL = bundled_pair() / "small"
TEXTS = (
    "What is 17 + 25?",
    "  two  spaces, 1234567 digits\n\n\tand tabs",
    "Umlaute: äöü, 漢字, emoji 🙂",
    "<|im_start|>user\nhello<|im_end|>",
    "def f(x): return x**2 # 100%",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf") / "tiny-Q.gguf"
    write_gguf(SMALL, place)
    return place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider"


@pytest.mark.slow
def test_a_file_has_the_tokens_and_the_template_of_its_checkpoint(file: Path, cache: Path) -> None:
    folder = checkpoint(str(file))
    assert Path(folder).name == "tiny-Q"
    assert Path(folder).is_relative_to(cache)
    assert (Path(folder) / LINK).resolve() == file.resolve()
    ours, theirs = ChatTokenizer.load(folder), ChatTokenizer.load(SMALL)
    for text in TEXTS:
        assert asyncio.run(ours.encode(text)) == asyncio.run(theirs.encode(text))
    messages = [InputMessage(role="user", content=TEXTS[0])]
    prompts = [asyncio.run(each.render_chat(messages)) for each in (ours, theirs)]
    assert prompts[0] == prompts[1]
    assert ours.stop_token_ids == theirs.stop_token_ids


@pytest.mark.slow
def test_the_second_start_makes_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint(str(file))
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert checkpoint(str(file)) == first
    assert len(list((cache / "gguf").iterdir())) == 1


@pytest.mark.slow
def test_settings_name_a_file_a_folder_or_an_id(file: Path, cache: Path) -> None:
    flags = {"models.large": str(file.parent), "models.small": "Qwen/Qwen3-0.6B"}
    named = named_models(load_settings(environ={}, flags=flags))
    assert named == {"large": checkpoint(str(file)), "small": "Qwen/Qwen3-0.6B"}


@pytest.mark.slow
def test_the_doctor_reads_a_file_and_tells_what_is_wrong_with_one(file: Path, cache: Path) -> None:
    flags = {"models.large": str(file), "models.small": "none"}
    found = {each.name: each for each in examine(load_settings(environ={}, flags=flags))}
    assert "GGUF weights, " in found["large model"].detail
    broken = cache.parent / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:1000])
    flags["models.large"] = str(broken)
    found = {each.name: each for each in examine(load_settings(environ={}, flags=flags))}
    assert found["large model"].status == "failed"
    assert "broken.gguf cannot be read as GGUF" in found["large model"].detail


def test_text_that_is_split_in_an_unknown_way_wants_a_tokenizer_beside_the_file(
    file: Path, tmp_path: Path
) -> None:
    header = read_header(file)
    fields = dict(header.fields) | {"tokenizer.ggml.pre": "unheard-of"}
    unknown = type(header)(path=file, fields=fields, tensors=header.tensors)
    with pytest.raises(UnsupportedModelError, match=r"split as 'unheard-of'.*Put .*tokenizer.json"):
        write_tokenizer(unknown, tmp_path)


@pytest.mark.slow
def test_a_vocabulary_that_transformers_cannot_read_is_told_in_one_sentence(
    file: Path, tmp_path: Path
) -> None:
    data = file.read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0gpt9", 1))
    with pytest.raises(UnsupportedModelError, match="its tokenizer cannot be read") as told:
        write_tokenizer(read_header(bad), tmp_path)
    assert "\n" not in str(told.value)
