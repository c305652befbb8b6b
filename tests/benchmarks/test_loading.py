"""Loading in a process of its own: sizes that make sense, for every scheme and kind."""

import json
from pathlib import Path

import pytest

from benchmarks.models import bench_loading
from outrider.engine.model.quantised.formats import SCHEMES


@pytest.mark.slow
def test_a_scheme_is_loaded_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_loading, "SCHEMES", ("int4",))
    monkeypatch.setattr(bench_loading, "_STORED_BITS", ())
    sizes = loaded_sizes(tmp_path)
    assert list(sizes) == ["bfloat16", "int4, first start", "int4, later starts"]
    assert sizes["bfloat16"] > sizes["int4, first start"] == sizes["int4, later starts"]


@pytest.mark.long
def test_every_scheme_is_loaded_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = loaded_sizes(tmp_path)
    assert len(sizes) == 1 + 2 * len(SCHEMES) + 4
    stored = {name: sizes.pop(name) for name in [*sizes] if name.startswith("stored")}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for bits in (4, 8):
        assert stored[f"stored in {bits} bits"] < stored[f"stored in {bits} bits, decoded"]
    assert stored["stored in 4 bits"] < stored["stored in 8 bits"]
    assert stored["stored in 4 bits, decoded"] == sizes["bfloat16"]


def loaded_sizes(folder: Path) -> dict[str, int]:
    """Run the benchmark; the bytes of the weights of each load."""
    bench_loading.main(["--results", str(folder)])
    (path,) = folder.glob("bench_loading-*.json")
    loads = json.loads(path.read_text())["results"]["loads"]
    for each in loads.values():
        assert each["peak_bytes"] >= each["final_bytes"] > 0
    return {name: each["weight_bytes"] for name, each in loads.items()}
