import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.dataset import RouterDataError, read_labelled_prompts

HEADER = "prompt,weak_correct,strong_correct,domain\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def encoded(numbers: list[float]) -> str:
    return base64.b64encode(np.array(numbers, dtype="<f4").tobytes()).decode()


def row(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "prompt": "a",
        "weak_correct": 1,
        "strong_correct": 0,
        "hidden_state": encoded([0.5, -1.0, 2.0]),
        "weak_logprobs": [-0.1, 0.0, -3],
        "pair": "aaaa-bbbb",
        "prompt_tokens": 12,
        "weak_tokens": 3,
        "strong_tokens": 4,
        "weak_s": 0.25,
        "strong_s": 1.5,
    }
    merged = values | changes
    return {name: value for name, value in merged.items() if value != "absent"}


def write_rows(path: Path, *rows: dict[str, object]) -> Path:
    return write(path, "".join(json.dumps(values) + "\n" for values in rows))


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
        assert (data.hidden, data.logprobs, data.num_prompt_tokens, data.pair) == (None,) * 4
    assert table.sha256 != lines.sha256


def test_large_labels_are_optional(tmp_path: Path) -> None:
    data = read_labelled_prompts(write(tmp_path / "a.csv", "prompt,weak_correct\nhi,1\n"))
    assert data.strong is None


def test_scores_go_before_labels(tmp_path: Path) -> None:
    text = "prompt,weak_correct,weak_score,strong_score,weak_s\nhi,1,0.25,1,0.5\nyou,0,0,0.75,1\n"
    data = read_labelled_prompts(write(tmp_path / "a.csv", text))
    assert data.weak.tolist() == [0.25, 0.0]
    assert data.strong is not None
    assert data.strong.tolist() == [1.0, 0.75]
    assert data.weak_s is not None
    assert data.weak_s.tolist() == [0.5, 1.0]


def test_collected_rows_are_read_whole(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "last"},
    ]
    path = write_rows(
        tmp_path / "a.jsonl", row(), row(prompt=None, messages=chat, weak_logprobs=[])
    )
    data = read_labelled_prompts(path)
    assert data.prompts == ["a", "last"]
    assert data.hidden is not None
    assert data.hidden.tolist() == [[0.5, -1.0, 2.0]] * 2
    assert data.logprobs is not None
    assert [seen.tolist() for seen in data.logprobs] == [[-0.1, 0.0, -3.0], []]
    assert data.pair == "aaaa-bbbb"
    columns = (
        (data.num_prompt_tokens, 12.0),
        (data.num_weak_tokens, 3.0),
        (data.num_strong_tokens, 4.0),
        (data.weak_s, 0.25),
        (data.strong_s, 1.5),
    )
    for column, value in columns:
        assert column is not None
        assert column.tolist() == [value, value]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_any_hidden_state_survives(numbers: list[float]) -> None:
    from outrider.router.dataset import _hidden_state

    assert _hidden_state(encoded(numbers)).tolist() == numbers


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", HEADER, "holds no rows"),
        ("a.csv", "question,weak_correct\nhi,1\n", "row 1: prompt is missing"),
        ("a.csv", "prompt,weak_correct\n  ,1\n", "row 1: prompt is missing or empty"),
        ("a.csv", "prompt,strong_correct\nhi,1\n", "row 1: weak_correct is missing"),
        ("a.csv", HEADER + "hi,0.4,1,x\n", r"weak_correct is '0\.4', not 0 or 1; a share"),
        ("a.csv", HEADER + "hi,1,,x\n", "strong_correct is '', not 0 or 1"),
        ("a.csv", "prompt,weak_score\nhi,1.5\n", r"weak_score is '1\.5', not a number in"),
        ("a.csv", "prompt,weak_score\nhi,nan\n", "weak_score is 'nan', not a number in"),
        ("a.csv", "prompt,weak_score\nhi,good\n", "weak_score is 'good', not a number in"),
        ("a.csv", "prompt,weak_correct,weak_s\nhi,1,-1\n", "weak_s is '-1', not a number"),
        ("a.csv", "prompt,weak_correct,weak_s\nhi,1,1\nyou,1,\n", "weak_s is missing in 1 rows"),
        ("a.jsonl", "{\n", "line 1: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: must be a JSON object"),
        ("a.jsonl", '{"prompt": 3, "weak_correct": 1}\n', "prompt is missing"),
        ("a.jsonl", '{"prompt": "a", "weak_correct": null}\n', "weak_correct is missing"),
        ("a.jsonl", '{"messages": [{"role": "user"}], "weak_correct": 1}\n', "prompt is missing"),
        ("a.jsonl", '{"messages": [], "weak_correct": 1}\n', "prompt is missing"),
        (
            "a.jsonl",
            '{"prompt": "a", "weak_correct": 1, "strong_correct": 1}\n'
            '{"prompt": "b", "weak_correct": 1}\n',
            "strong_correct is missing in 1 rows",
        ),
        (
            "a.jsonl",
            '{"prompt": "a", "weak_correct": 1}\n'
            '{"prompt": "b", "weak_correct": 1, "strong_correct": 1}\n',
            "line 2: strong_correct is given here but is missing in 1 rows before",
        ),
        ("a.txt", "hi", "must end in"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(RouterDataError, match=why):
        read_labelled_prompts(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"hidden_state": encoded([1.0, 2.0])},
            "hidden_state has 2 numbers, the first row's has 3",
        ),
        ({"hidden_state": encoded([1.0, np.nan, 2.0])}, "hidden_state holds numbers that are not"),
        ({"hidden_state": "AAAAAAA="}, "hidden_state holds 5 bytes, which are not whole float32"),
        ({"hidden_state": "A"}, "hidden_state is not base64"),
        ({"hidden_state": "ä"}, "hidden_state is not base64"),
        ({"hidden_state": [1.0]}, "hidden_state must be a string"),
        ({"hidden_state": "absent"}, "hidden_state is missing in 1 rows of 2"),
        ({"weak_logprobs": [0.5]}, "weak_logprobs holds numbers that are above 0"),
        ({"weak_logprobs": ["x"]}, "weak_logprobs must be a list of numbers"),
        ({"weak_logprobs": [True]}, "weak_logprobs must be a list of numbers"),
        ({"weak_logprobs": -1.0}, "weak_logprobs must be a list of numbers"),
        ({"weak_logprobs": [-float("inf")]}, "weak_logprobs holds numbers that are"),
        ({"pair": "aaaa-cccc"}, "pair is aaaa-cccc, the first row's is aaaa-bbbb"),
        ({"pair": 7}, "pair is 7"),
        ({"prompt_tokens": True}, "prompt_tokens is True, not a number of 0 or more"),
        ({"strong_s": float("nan")}, "strong_s is nan, not a number of 0 or more"),
        ({"weak_correct": 0.5}, "weak_correct is 0.5, not 0 or 1"),
    ],
)
def test_a_bad_collected_row_is_named(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", row(), row(**changes))
    with pytest.raises(RouterDataError, match=why) as caught:
        read_labelled_prompts(path)
    assert str(path) in str(caught.value)
    assert "line 2" in str(caught.value) or "rows of 2" in str(caught.value)


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(RouterDataError, match="no such file"):
        read_labelled_prompts(tmp_path / "none.csv")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RouterDataError, match="decode"):
        read_labelled_prompts(tmp_path / "a.jsonl")
