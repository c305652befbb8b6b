"""Loading in a process of its own: sizes that make sense, for every scheme and kind."""

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
    assert len(loads) == 1 + 2 * len(SCHEMES) + 4
    for each in loads.values():
        assert each["weight_bytes"] > 0
        assert each["peak_bytes"] >= each["final_bytes"] > 0
    sizes = {name: each["weight_bytes"] for name, each in loads.items()}
    stored = {name: sizes.pop(name) for name in loads if name.startswith("stored")}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for bits in (4, 8):
        assert stored[f"stored in {bits} bits"] < stored[f"stored in {bits} bits, decoded"]
    assert stored["stored in 4 bits"] < stored["stored in 8 bits"]
    assert stored["stored in 4 bits, decoded"] == sizes["bfloat16"]
