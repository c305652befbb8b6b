import argparse
import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared import harness
from benchmarks.shared.harness import Summary, measure_in_turn, paired_ratio, percentile, plain

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.floats(0, 100))
def test_percentile_is_numpys(samples: list[float], percent: float) -> None:
    assert percentile(samples, percent) == pytest.approx(
        float(np.percentile(samples, percent)), rel=1e-9, abs=1e-6
    )


def test_summary_of_known_samples() -> None:
    summary = Summary.of([4.0, 1.0, 3.0, 2.0])
    assert (summary.median, summary.minimum, summary.maximum) == (2.5, 1.0, 4.0)
    assert summary.num_samples == 4
    assert summary.p99 == pytest.approx(3.97)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


def test_ratios_are_taken_round_by_round() -> None:
    # The machine is ten times slower in the second round; the ratio does not notice.
    ratio = paired_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert (ratio.minimum, ratio.median, ratio.maximum) == (2.0, 2.0, 2.0)


def test_ratios_of_unequal_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio([1.0, 2.0], [1.0])


def test_cases_are_warmed_up_and_then_run_in_turn() -> None:
    calls: list[str] = []

    def case(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = measure_in_turn({"a": lambda: case("a"), "b": lambda: case("b")}, repeats=2)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": [3, 5], "b": [4, 6]}


def test_a_shorter_warm_up_takes_the_place_of_the_cases() -> None:
    calls: list[str] = []
    measure_in_turn(
        {name: lambda name=name: calls.append(name) for name in "ab"},
        repeats=1,
        warm_up={name: lambda name=name: calls.append(name.upper()) for name in "ab"},
    )
    assert calls == ["A", "B", "a", "b"]


def test_warming_up_one_side_only_is_refused() -> None:
    cases = {"a": lambda: 1, "b": lambda: 2}
    with pytest.raises(ValueError, match="warmed up"):
        measure_in_turn(cases, repeats=1, warm_up={"a": lambda: 1})
    with pytest.raises(ValueError, match="repeats=0"):
        measure_in_turn(cases, repeats=0)


def test_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < harness.measure_bandwidth(num_bytes=1 << 24) < 1e14


def test_results_say_what_they_depend_on_and_nothing_personal(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        seed=7, large=tmp_path / "private" / "some-model", device="cpu", results=tmp_path
    )
    path = harness.write_results(
        "bench_thing", "demo", {"speed": Summary.of([1.0, 2.0]), 4: [1 / 3]}, arguments
    )
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    assert path.name == "bench_thing-demo.json"
    assert record["arguments"]["seed"] == 7
    assert record["arguments"]["large"] == "some-model"
    assert record["results"]["speed"]["median"] == 1.5
    assert record["results"]["4"] == [0.333333]
    environment = record["environment"]
    assert {"commit", "dirty", "cpu", "cores", "torch_threads", "versions"} <= environment.keys()
    assert environment["versions"]["torch"]
    values = json.dumps({**record["environment"], **record["arguments"]})
    for private in (
        str(tmp_path),
        socket.gethostname(),
        str(Path.home()),
        f'"{getpass.getuser()}"',
    ):
        assert private not in values


def test_invalid_figures_are_refused() -> None:
    with pytest.raises(TypeError, match="object has no place"):
        plain({"a": [object()]})


@pytest.mark.slow
def test_the_environment_is_set_for_the_script_and_taken_back_for_others() -> None:
    # The script starts over once: only its second self runs `main`.
    script = """
import os
from benchmarks.shared.harness import start, without_engine_environment
def main():
    inside = os.environ.get("GOMP_SPINCOUNT")
    with without_engine_environment():
        print("main", inside, os.environ.get("GOMP_SPINCOUNT"), os.environ.get("KMP_BLOCKTIME"))
    assert os.environ["GOMP_SPINCOUNT"] == inside
start(main)
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT",)}
    environment["KMP_BLOCKTIME"] = "77"  # the user's own is left alone
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=harness.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split("\n")[:-1] == ["main 2000 None 77"]
