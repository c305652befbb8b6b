"""bench_load in virtual time."""

import json
from pathlib import Path

import pytest

from benchmarks.simulate import simulate_load


@pytest.mark.slow
def test_a_pair_that_agrees_pays_for_one_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--most", "4", "--pairs", "1", "--steps", "60", "--processor", "avx2"]
    simulate_load.main([*options, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("simulate_load-*-avx2.json")
    points = json.loads(path.read_text())["results"]["points"]
    assert list(points) == ["1", "2", "4"]
    for point in points.values():
        assert point["ratio"]["tokens_per_s"]["estimate"] > 0.9
        assert point["off"]["wasted_nodes_per_token"] == 0.0
    assert points["1"]["ratio"]["tokens_per_s"]["estimate"] > 1.2
    assert points["1"]["ratio_at_most"]["tokens_per_s"]["estimate"] > 1.2
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "virtual time, avx2" in capsys.readouterr().out
