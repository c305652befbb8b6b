import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.prompts import load_prompts
from outrider.draft.training.tasks.families import split_of


class _Words:
    """A tokenizer whose tokens are characters."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"turns": ["first", "second"], "category": "math"}, "first"),
        ({"question": "how many"}, "how many"),
        ({"prompt": "def f():"}, "def f():"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "hello"),
    ],
)
def test_prompts_of_every_layout_are_read_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], text: str
) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    prompts = load_prompts("rows.jsonl.gz", _Words(), num_prompts=3)
    assert [bytes(prompt.token_ids).decode() for prompt in prompts] == [text] * 3
    assert prompts[0].kind == row.get("category", "rows")


def test_an_absent_file_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"no such file .*OUTRIDER_DATA is not set"):
        load_prompts("nowhere.jsonl", _Words(), num_prompts=1)


def test_prompts_that_are_all_too_long_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    with pytest.raises(SystemExit, match="at most 50 tokens"):
        load_prompts(str(file), _Words(), num_prompts=2, max_tokens=50)


def test_tasks_are_held_out_distinct_and_the_same_for_a_seed() -> None:
    prompts = load_prompts("tasks", _Words(), num_prompts=20, seed=3)
    texts = ["".join(map(chr, prompt.token_ids)) for prompt in prompts]
    assert len(set(texts)) == 20
    assert {split_of(text) for text in texts} == {"heldout"}
    assert prompts == load_prompts("tasks", _Words(), num_prompts=20, seed=3)
