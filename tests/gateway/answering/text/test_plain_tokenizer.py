"""A tokenizer that is read without transformers has the same ids, names and template."""

import json
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.plain_tokenizer import PlainTokenizer, load_tokenizer
from outrider.gateway.answering.text.tokenizer_config import _MODEL, _PARTS
from outrider.gateway.settings.extras import MissingExtraError
from tests.engines import PAIR_FOLDER

_LOAD_PAIR = """
import sys
from outrider.gateway.answering.text.chat import ChatTokenizer
tokenizer = ChatTokenizer.load(sys.argv[1])
assert tokenizer.token_texts and tokenizer.stop_token_ids
print(*(name for name in ("transformers", "torch") if name in sys.modules))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tokenizer's files, to be changed."""
    for path in (PAIR_FOLDER / "large").iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("tier", ["large", "small"])
def test_the_bundled_pair_is_read_alike(tier: str) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(PAIR_FOLDER / tier)
    ours = PlainTokenizer.find(PAIR_FOLDER / tier)
    assert ours is not None
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.slow
@given(text=st.text(max_size=200))
def test_ids_are_the_same(text: str) -> None:
    folder = PAIR_FOLDER / "large"
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert isinstance(ours, PlainTokenizer)
    text += "<|end|>" + text
    for with_special in (False, True):
        found = ours.backend_tokenizer.encode(text, add_special_tokens=with_special).ids
        assert found == theirs.encode(text, add_special_tokens=with_special)


def test_a_chat_tokenizer_is_the_same_either_way() -> None:
    folder = PAIR_FOLDER / "large"
    ours, theirs = ChatTokenizer.load(folder), ChatTokenizer(AutoTokenizer.from_pretrained(folder))
    for name in ("fingerprint", "rendering", "stop_token_ids", "token_texts", "may_think"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.slow
def test_loading_the_bundled_pair_imports_no_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_PAIR, str(PAIR_FOLDER / "large")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "GPT2TokenizerFast"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"split_special_tokens": True},
        {"fix_mistral_regex": True},
        {"image_token": "<|new|>"},
        {"eos_token": "<|new|>"},
        {"eos_token": {"content": "<|end|>", "lstrip": True}},
        {"extra_special_tokens": ["<|new|>"]},
        {"extra_special_tokens": {"image_token": "<|user|>"}},
        {"added_tokens_decoder": {"0": {"content": "<|pad|>"}}},
    ],
)
def test_tokenizers_that_transformers_changes_are_left_to_it(
    changes: dict[str, Any], folder: Path
) -> None:
    edit(folder / "tokenizer_config.json", **changes)
    assert PlainTokenizer.find(folder) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tekken.json"])
def test_other_files_are_left_to_transformers(name: str, folder: Path) -> None:
    (folder / name).write_text("{}")
    assert PlainTokenizer.find(folder) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizer"},
        {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True},
        {"image_token": "<|user|>", "pad_token": None},
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>"}},
        {"chat_control_tokens": ["<|user|>"]},
        {"chat_template": [{"name": "default", "template": "a"}]},
    ],
)
def test_what_transformers_ignores_changes_nothing(changes: dict[str, Any], folder: Path) -> None:
    edit(folder / "tokenizer_config.json", **changes)
    (folder / "chat_template.jinja").unlink()
    check_equal(folder)


def test_listed_tokens_that_are_the_same_change_nothing(folder: Path) -> None:
    """Such a list is in most published folders, with older files that it stands for."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    listed = {str(each["id"]): dict(each) for each in saved["added_tokens"]}
    for each in listed.values():
        del each["id"]
    edit(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|none|>"}')
    check_equal(folder)
    next(iter(listed.values()))["lstrip"] = True
    edit(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    assert PlainTokenizer.find(folder) is None


def test_files_with_templates_go_before_those_in_the_config(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    edit(folder / "tokenizer_config.json", chat_template="never")
    check_equal(folder)
    (folder / "chat_template.jinja").unlink()
    check_equal(folder)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
GEMMA_NAMES = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn>")


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("Qwen2Tokenizer", "qwen3"), ("GPT2TokenizerFast", "gpt2"), ("GemmaTokenizer", "gemma3_text")],
)
def test_classes_whose_parts_are_in_the_file(kind: str, model_type: str, folder: Path) -> None:
    """As published folders of these families are, apart from the size."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    name = kind.removesuffix("Fast")
    parts = deepcopy(dict(_PARTS[name]))
    saved |= {"normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"]}
    saved["model"] = {
        **saved["model"],
        **dict.fromkeys(_MODEL),
        **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
        **parts["model"],
    }
    names: dict[str, Any] = {"unk_token": None, "bos_token": None, "pad_token": "<|end|>"}
    if name == "GemmaTokenizer":
        names = {}
        texts = [*GEMMA_NAMES, *BYTES, *map(chr, range(33, 127)), "▁", "▁t", "▁th", "é"]
        saved["model"]["vocab"] = {text: i for i, text in enumerate(texts)}
        saved["model"]["merges"] = [["▁", "t"], ["▁t", "h"]]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        saved["added_tokens"] = [
            {"id": i, "content": text, "special": True, **flags}
            for i, text in enumerate(GEMMA_NAMES)
        ]
        saved["post_processor"] = None
        replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
        saved["decoder"] = {"type": "Sequence", "decoders": steps}
    else:
        pre = saved["pre_tokenizer"].get("pretokenizers", [saved["pre_tokenizer"]])[-1]
        pre["trim_offsets"] = False
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    config = {"tokenizer_class": kind, "chat_template": "{{ messages }}", **names}
    if name != "GemmaTokenizer":
        config["eos_token"] = "<|end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    edit(folder / "config.json", model_type=model_type)
    check_equal(folder)


TEXTS = (
    "The quick  brown fox, it's 12345 — l'été\r\n\n\tx",
    "<|end|><|user|> <eos><turn> ▁the <think>\n\n e\u0301 漢字 🙂 ﷺ \u2028",
    "",
)


def check_equal(folder: Path) -> None:
    """Compare with what AutoTokenizer reads: ids both ways, names, templates."""
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = PlainTokenizer.find(folder)
    assert ours is not None
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template
    assert ours.chat_control_tokens == theirs.chat_control_tokens
    mine, other = ours.backend_tokenizer, theirs.backend_tokenizer
    assert repr(mine.get_added_tokens_decoder()) == repr(other.get_added_tokens_decoder())
    for text in TEXTS:
        for with_special in (False, True):
            ids = mine.encode(text, add_special_tokens=with_special).ids
            assert ids == theirs.encode(text, add_special_tokens=with_special)
            assert mine.decode(ids) == other.decode(ids)


def test_a_hub_id_needs_no_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small files alone are fetched: no weights."""
    asked: list[Any] = []

    def download(model_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((model_id, any("safetensors" in each for each in allow_patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setitem(sys.modules, "transformers", None)
    loaded = ChatTokenizer.load("someone/model")
    assert loaded.rendering == ChatTokenizer.load(folder).rendering
    assert set(asked) == {("someone/model", False)}


def test_a_missing_transformers_is_named_with_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tekken.json").write_text("{}")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r'pip install "outrider\[transformers\]"$'):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
