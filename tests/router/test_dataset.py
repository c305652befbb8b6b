from pathlib import Path

import pytest

from router.dataset import RouterDataError, read_labelled_prompts

HEADER = "prompt,weak_correct,strong_correct,domain\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_and_jsonl_read_the_same(tmp_path: Path) -> None:
    table = read_labelled_prompts(
        write(tmp_path / "a.csv", HEADER + '"two\nlines, é",1,0,x\nplain,0,1,y\nplain,0.0,True,y\n')
    )
    lines = read_labelled_prompts(
        write(
            tmp_path / "a.jsonl",
            '{"prompt": "two\\nlines, é", "weak_correct": 1, "strong_correct": 0, "z": 3}\n\n'
            '{"prompt": "plain", "weak_correct": false, "strong_correct": true}\n'
            '{"prompt": "plain", "weak_correct": 0.0, "strong_correct": "1"}\n',
        )
    )
    for data in (table, lines):
        assert data.prompts == ["two\nlines, é", "plain", "plain"]
        assert data.weak.tolist() == [1.0, 0.0, 0.0]
        assert data.strong is not None
        assert data.strong.tolist() == [0.0, 1.0, 1.0]
        assert data.num_duplicates == 1
    assert table.sha256 != lines.sha256


def test_large_labels_are_optional(tmp_path: Path) -> None:
    data = read_labelled_prompts(write(tmp_path / "a.csv", "prompt,weak_correct\nhi,1\n"))
    assert data.strong is None


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", HEADER, "holds no rows"),
        ("a.csv", "question,weak_correct\nhi,1\n", "row 1: prompt is missing"),
        ("a.csv", "prompt,weak_correct\n  ,1\n", "row 1: prompt is missing or empty"),
        ("a.csv", "prompt,strong_correct\nhi,1\n", "row 1: weak_correct is missing"),
        ("a.csv", HEADER + "hi,0.4,1,x\n", r"weak_correct is '0\.4', not 0 or 1"),
        ("a.csv", HEADER + "hi,1,,x\n", "strong_correct is '', not 0 or 1"),
        ("a.jsonl", "{\n", "line 1: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: must be a JSON object"),
        ("a.jsonl", '{"prompt": 3, "weak_correct": 1}\n', "prompt is missing"),
        ("a.jsonl", '{"prompt": "a", "weak_correct": null}\n', "weak_correct is missing"),
        (
            "a.jsonl",
            '{"prompt": "a", "weak_correct": 1, "strong_correct": 1}\n'
            '{"prompt": "b", "weak_correct": 1}\n',
            "strong_correct is missing in 1 rows",
        ),
        ("a.txt", "hi", "must end in"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(RouterDataError, match=why):
        read_labelled_prompts(write(tmp_path / name, text))


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(RouterDataError, match="no such file"):
        read_labelled_prompts(tmp_path / "none.csv")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RouterDataError, match="decode"):
        read_labelled_prompts(tmp_path / "a.jsonl")
