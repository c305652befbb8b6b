"""Loading in a process of its own: sizes that make sense, for every scheme."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_loading
from engine.model.quantised.formats import SCHEMES


@pytest.mark.slow
def test_every_scheme_is_loaded_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_loading.main(["--results", str(tmp_path)])
    (path,) = tmp_path.glob("bench_loading-*.json")
    loads = json.loads(path.read_text())["results"]["loads"]
    assert len(loads) == 1 + 2 * len(SCHEMES)
    for each in loads.values():
        assert each["weight_bytes"] > 0
        assert each["peak_bytes"] >= each["final_bytes"] > 0
    sizes = [each["weight_bytes"] for each in loads.values()]
    assert sizes == sorted(sizes, reverse=True)
