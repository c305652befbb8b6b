"""RouterBench's rows as labels, and the heights that lines of tiers are compared by."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing.bench_tiers import Line, Pool, height
from benchmarks.routing.routerbench import FOLDER, SETS, write_labels


def test_rows_without_a_label_and_solved_examples_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for name in SETS:
        with (tmp_path / FOLDER / f"{name}_test.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt", "a", "b", "a|total_cost", "b|total_cost"])
            rows.writerow([str(["Solved.\nA\n\nOpen?\nB"]), 1.0, 0.5, 0.001, 0.02])
            rows.writerow([str(["Another?"]), "", 0.5, 0.001, 0.02])
    out = write_labels(tmp_path, "test", ["a", "b"], tmp_path / "labels.jsonl")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["Open?\nB"] * len(SETS)
    assert lines[0]["b|total_cost"] == 0.02
    with pytest.raises(SystemExit, match=r"arc_challenge_train\.csv is not under"):
        write_labels(tmp_path, "train", ["a"], out)


def test_a_height_may_mix_two_settings() -> None:
    points = [(1.0, 0.4), (3.0, 0.8), (5.0, 0.7)]
    assert [height(points, usd) for usd in (1.0, 2.0, 3.0, 5.0)] == pytest.approx(
        [0.4, 0.6, 0.8, 0.8]
    )


def test_every_hull_may_begin_at_the_cheapest_model() -> None:
    pool = Pool(scores=np.array([[0.0, 1.0], [1.0, 1.0]]), usd=np.array([[1.0, 1.0], [3.0, 3.0]]))
    dear_only = Line(scores=np.array([[1.0, 1.0]]), usd=np.array([[3.0, 3.0]]))
    assert pool.aiq(dear_only, np.array([0.5, 0.5])) == pytest.approx(0.75)
