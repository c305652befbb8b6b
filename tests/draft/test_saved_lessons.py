"""What drafting has learnt on disk: taken where it makes sense, ignored where it does not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from outrider.draft.budget.step_choice import StepChoice
from outrider.draft.saved_lessons import SavedLessons

PACE = [40.0, 50.0, 44.0, 40.0]
GROUP: dict[str, Any] = {
    "company": [1, True, False, False, 0],
    "known": {"head": [0.0] * 4, "small": PACE, "text": [0.0] * 4, "plain": PACE},
    "num_lost": {"head": 0, "small": 3, "text": 0, "plain": 0},
    "num_steps": 100,
    "num_sequences": 1,
}


def learnt_by() -> StepChoice:
    choice = StepChoice(lambda: 0.0)
    choice.recall([GROUP])
    return choice


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "lessons.json"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def changed(**fields: Any) -> dict[str, Any]:
    return {"version": 1, "groups": [GROUP | fields]}


def test_a_file_is_private_whole_and_written_at_the_end(path: Path) -> None:
    SavedLessons(path, learnt_by()).start()()
    assert json.loads(path.read_bytes())["version"] == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        "{}",
        {"version": 2, "groups": []},
        {"version": 1, "groups": 3},
        changed(company=[1]),
        changed(num_sequences=0),
        changed(num_sequences=None),
        changed(known={}),
        changed(known=GROUP["known"] | {"small": [1.0, 1.0, -1.0, 1.0]}),
        changed(known=GROUP["known"] | {"small": [float("nan")] * 4}),
        changed(num_lost={}),
        " " * (1 << 20) + "{}",
    ],
)
def test_a_wrong_file_is_ignored_with_a_line_in_the_log(
    content: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, content)
    choice = StepChoice(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        SavedLessons(path, choice).recall()
    assert "ignored" in caplog.text
    assert not choice.learnt()


def test_a_right_file_is_recalled_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, changed())
    choice = StepChoice(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        SavedLessons(path, choice).recall()
        SavedLessons(path.parent / "missing", StepChoice(lambda: 0.0)).recall()
    assert not caplog.text
    assert len(choice.learnt()) == 1


def test_a_folder_that_cannot_be_made_loses_only_what_was_learnt(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    SavedLessons(tmp_path / "file" / "cache" / "x.json", learnt_by()).save()
