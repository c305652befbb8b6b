import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.router_cli import app
from router.scorer import RouterScorer
from tests.router.conftest import labelled_sums, write_jsonl

runner = CliRunner()


def test_train_then_eval(training_file: Path, held_out_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "router"
    trained = runner.invoke(app, ["train", "--data", str(training_file), "--out", str(out)])
    assert trained.exit_code == 0, trained.output
    assert "threshold" in trained.output

    arguments = ["eval", "--router", str(out), "--data", str(held_out_file), "--resamples", "50"]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["apgr"] > 0.75
    assert report["cpt50"] < report["cpt80"] < 0.8
    assert report["apgr_interval"][0] < report["apgr"] < report["apgr_interval"][1]
    assert report["num_prompts"] == 400

    table = runner.invoke(app, arguments)
    assert table.exit_code == 0
    for word in ("APGR", "CPT(50%)", "random", "oracle", "best single"):
        assert word in table.output


def test_no_gap_is_said_and_weak_only_routes_all_the_same(tmp_path: Path) -> None:
    data, out = labelled_sums(100, seed=3), str(tmp_path / "router")
    file = str(write_jsonl(tmp_path / "a.jsonl", replace(data, strong=data.weak)))
    plain = runner.invoke(app, ["train", "--data", file, "--out", out])
    assert "the large model adds nothing" in plain.output
    assert RouterScorer.load(Path(out)).threshold == 0.0
    weak_only = runner.invoke(app, ["train", "--data", file, "--out", out, "--weak-only"])
    assert "taken as never wrong" in weak_only.output
    assert RouterScorer.load(Path(out)).threshold > 0.3


def test_data_is_also_looked_up_under_the_variable(
    held_out_file: Path, router_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_DATA", str(held_out_file.parent))
    arguments = ["eval", "--router", str(router_folder), "--data", held_out_file.name, "--json"]
    result = runner.invoke(app, [*arguments, "--resamples", "0"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("router", "data", "why"),
    [(None, "none.csv", "no such file"), ("nowhere", None, "No such file")],
)
def test_what_is_missing_is_named(
    router: str | None,
    data: str | None,
    why: str,
    router_folder: Path,
    held_out_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    arguments = ["--router", router or str(router_folder), "--data", data or str(held_out_file)]
    result = runner.invoke(app, ["eval", *arguments])
    assert result.exit_code == 2
    assert why in result.output


def test_labels_of_one_tier_cannot_be_judged(router_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "weak.csv"
    data.write_text("prompt,weak_correct\nhi,1\n", encoding="utf-8")
    result = runner.invoke(app, ["eval", "--router", str(router_folder), "--data", str(data)])
    assert result.exit_code == 2
    assert "strong_correct" in result.output


def test_too_few_rows_to_train(tmp_path: Path) -> None:
    data = tmp_path / "weak.csv"
    data.write_text("prompt,weak_correct\nhi,1\n", encoding="utf-8")
    out = tmp_path / "router"
    result = runner.invoke(app, ["train", "--data", str(data), "--out", str(out)])
    assert result.exit_code == 2
    assert "too few" in result.output
    assert not out.exists()
