"""A tokenizer that is read without transformers has the same ids, names and template."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider.gateway.text.chat import ChatTokenizer
from outrider.gateway.text.plain_tokenizer import PlainTokenizer, load_tokenizer
from tests.engines import PAIR_FOLDER

_LOAD_PAIR = """
import sys
from outrider.gateway.text.chat import ChatTokenizer
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
        {"tokenizer_class": "LlamaTokenizer"},
        {"add_bos_token": True},
        {"eos_token": "<|new|>"},
        {"eos_token": {"content": "<|end|>", "lstrip": True}},
        {"extra_special_tokens": ["<|new|>"]},
        {"extra_special_tokens": {"image_token": "<|user|>"}},
        {"added_tokens_decoder": {"0": {"content": "<|pad|>"}}},
        {"chat_template": [{"name": "default", "template": ""}]},
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


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
