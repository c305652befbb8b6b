"""`outrider router drift`: newer labels against what a router promised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.gateway.tools.learning.routers.commands import app
from outrider.router.dataset import LabelledPrompts, RouterDataError, read_labelled_prompts
from outrider.router.scorer import RouterScorer
from tests.router.conftest import labelled_sums, write_jsonl

NUM_ROWS = 400


def drift(router: Path, data: Path, *more: str | Path) -> Result:
    arguments = ["drift", "--router", router, "--data", data, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report(router: Path, data: Path, *more: str | Path) -> dict[str, Any]:
    found = json.loads(drift(router, data, *more, "--json").stdout)
    assert isinstance(found, dict)
    return found


def worse(data: LabelledPrompts) -> LabelledPrompts:
    """The small model has unlearnt half of what it knew."""
    lost = np.random.default_rng(0).random(len(data.prompts)) < 0.5
    return replace(data, weak=np.where(lost, 0.0, data.weak))


@pytest.mark.slow
def test_prompts_like_those_of_the_training_do_not_drift(
    router_folder: Path, held_out_file: Path
) -> None:
    found = report(router_folder, held_out_file)
    assert (found["is_drifting"], found["reasons"]) == (False, [])
    assert found["kept_quality"] >= found["promised_quality"] > 0.8
    assert found["unlike_share"] < 0.05
    plain = drift(router_folder, held_out_file)
    assert plain.exit_code == 0
    assert "No drift." in plain.output


@pytest.mark.slow
def test_a_small_model_that_got_worse_is_noticed_and_mended(
    router_folder: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "worse.jsonl", worse(labelled_sums(NUM_ROWS, seed=3)))
    plain = drift(router_folder, data)
    assert plain.exit_code == 1
    assert "of the large model's accuracy is kept" in plain.output
    before = report(router_folder, data)
    assert before["is_broken"]
    assert before["kept_quality"] < before["promised_quality"]
    out = tmp_path / "mended"
    mended = drift(router_folder, data, "--out", out)
    assert (mended.exit_code, "Wrote" in mended.stderr) == (0, True)
    again = report(out, data)
    assert not again["is_broken"]
    assert again["kept_quality"] > before["kept_quality"]
    assert len(RouterScorer.load(out).assurances) == 1


@pytest.mark.slow
def test_prompts_of_another_kind_are_noticed(router_folder: Path, tmp_path: Path) -> None:
    sums = labelled_sums(NUM_ROWS, seed=3)
    verses = [f"Schreibe Vers {number} über Ägypten" for number in range(NUM_ROWS)]
    data = write_jsonl(tmp_path / "verses.jsonl", replace(sums, prompts=verses))
    assert report(router_folder, data)["unlike_share"] > 0.9
    assert "unlike those of the training" in drift(router_folder, data).output


def labelled_in(path: Path, width: str) -> Path:
    rows = [json.loads(line) | {"small_weights": width} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_each_width_has_an_assurance_of_its_own(router_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "router"
    for width in ("int8", "int4"):
        sums = labelled_sums(NUM_ROWS, seed=3)
        path = write_jsonl(tmp_path / "sums.jsonl", sums if width == "int8" else worse(sums))
        data = labelled_in(path, width)
        source = router_folder if width == "int8" else out
        assert drift(source, data, "--out", out).exit_code == 0
    widths = {each.small_weights: each for each in RouterScorer.load(out).assurances}
    assert set(widths) == {None, "int8", "int4"}
    shares = [widths[name].stages[0].setting(0.9).strong_share for name in ("int8", "int4")]
    assert shares[0] is not None
    assert shares[1] is not None
    assert shares[0] < shares[1]


def test_a_file_has_labels_of_one_width(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [
        {"prompt": str(n), "weak_correct": 1, "strong_correct": 1, "small_weights": width}
        for n, width in enumerate(("int8", "int4"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RouterDataError, match=r"line 2: small_weights is int4, .* int8"):
        read_labelled_prompts(path)
    path.write_text(json.dumps(rows[0] | {"small_weights": 8}) + "\n")
    with pytest.raises(RouterDataError, match="small_weights"):
        read_labelled_prompts(path)
