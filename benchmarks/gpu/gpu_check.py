"""All that needs a GPU, in two parts of 290 and 400 seconds: `make gpu-check`.

The first part is gpu_first: all kernels are compiled side by side, compared with their references
at serving shapes, and the first figures are there. The second part is gpu_first's figures, then the
kernels' tests and those that are marked for a GPU, then the benchmarks of kernels and attention.
Each can be run alone, on a machine that has nothing yet.

Whatever Python the machine has will do: torch, triton, transformers, safetensors, numpy and pytest
are enough. Tests run side by side, since most of their time is compiling; all else runs alone. A
step that fails or runs out of time is reported, and the others go on; the exit status is 1 then, 2
where there is no GPU. gpu_first's lines are in runs/gpu-check/gpu_first.jsonl as they come; every
test's seconds are in gpu_check-<device>.json.

    make gpu-check                        on a GPU machine, both parts
    make gpu-check ARGS="--part first"    one of them
    make gpu-check DRY=1                  without one: gpu_first and benchmarks tiny in the
                                          interpreter, the kernels' tests collected, those marked
                                          for a GPU run on the CPU

Tensor parallelism is not among it: NCCL wants a device for each rank, and this is for one. Its laws
run on gloo ranks in the ordinary tests (tests/laws/test_parallel_law.py).
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    *("torch", "triton", "transformers", "safetensors", "numpy"),
    *("pytest", "pytest_timeout", "hypothesis"),
)

FIRST_S, SECOND_S = 290.0, 400.0  # of the parts
_ENDING_S = 25.0  # of a part, for starting and stopping
_FIGURES_S = 110.0  # of the second part, then
_TESTS_S = 130.0
# Most of a kernel test is compiling, on the CPU; more at a time would fight for it.
_TESTS_AT_ONCE = 8
_LEAST_S = 15.0  # less time than this is no use to a benchmark
_SHOWN_CASES = 12
_GRACE_S = 12.0  # from a benchmark's budget to its end by force


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A module of benchmarks/ and its share of the time that the tests leave."""

    module: str
    share: float


BENCHMARKS = (
    Benchmark(module="bench_kernels", share=0.42),
    Benchmark(module="bench_paged_attention", share=0.58),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a part; `problem` is None where all went well. `cases`: seconds of each test."""

    name: str
    seconds: float
    problem: str | None
    output: str = ""
    cases: dict[str, float] = field(default_factory=dict)


# ---- what there is ------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    """Those of NEEDED that this Python has not."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def has_gpu() -> bool:
    """Return whether torch sees one; without torch, whether there is a driver."""
    if importlib.util.find_spec("torch") is None:
        return shutil.which("nvidia-smi") is not None
    import torch

    return torch.cuda.is_available()


def kernel_tests() -> list[Path]:
    """The kernels' test files. Compiling ahead of time is for machines without a GPU."""
    files = sorted((ROOT / "tests" / "kernels").rglob("test_*.py"))
    return [file for file in files if file.name != "test_ahead_of_time.py"]


_GPU_MARK: Final = re.compile(r"^[^\"'\n]*pytest\.mark\.gpu\b", re.MULTILINE)
"""Not within a string: tests of this file write some."""


def gpu_marked_tests() -> list[Path]:
    """Other test files with tests that are marked for a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        file
        for file in files
        if not file.is_relative_to(ROOT / "tests" / "kernels")
        and _GPU_MARK.search(file.read_text(encoding="utf-8"))
    ]


# ---- running it ---------------------------------------------------------------------------------


def run_part(name: str, command: Sequence[str], *, limit_s: float, quiet: bool) -> Outcome:
    """Run a program of ours for at most so long, or `inf`; `quiet` keeps its output back."""
    started_s = time.monotonic()
    output, problem = "", None
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            timeout=max(limit_s, 1.0) if limit_s < inf else None,
            text=True,
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
        )
        output = ended.stdout or ""
        if ended.returncode:
            problem = f"exit status {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        caught = error.stdout or ""
        output = caught.decode(errors="replace") if isinstance(caught, bytes) else caught
        problem = f"ended after {limit_s:.0f} s"
    seconds = time.monotonic() - started_s
    return Outcome(name=name, seconds=seconds, problem=problem, output=output)


def pytest_command(files: Sequence[Path], *more: str) -> list[str]:
    """Test files in one process; warnings of other versions than ours are no failures here."""
    return [
        *(sys.executable, "-m", "pytest", *(str(file.relative_to(ROOT)) for file in files)),
        *("-q", "--no-header", "-p", "no:cacheprovider", "-W", "default", *more),
    ]


def run_gpu_first(folder: Path, until_s: float, *, figures: bool, is_dry: bool) -> list[Outcome]:
    """The checks and first figures, or the figures."""
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.gpu_first"),
        *("--out", str(folder), "--until", f"{until_s:.0f}"),
        *(["--figures"] if figures else []),
        *(["--dry"] if is_dry else []),
    ]
    name = "gpu_first, figures" if figures else "gpu_first"
    print(f"\n==== {name}, {until_s:.0f} s", flush=True)
    outcome = run_part(name, command, limit_s=until_s + _GRACE_S, quiet=False)
    say(outcome)
    return [outcome]


def collect_tests(ends_at: float) -> list[Outcome]:
    """See that all test files of kernels can be imported."""
    files = kernel_tests()
    command = pytest_command(files, "--collect-only")
    left_s = ends_at - time.monotonic()
    outcome = run_part(f"{len(files)} test files", command, limit_s=left_s, quiet=True)
    say(outcome)
    return [outcome]


def build_products(ends_at: float, folder: Path = ROOT / "kernels" / "cpu") -> list[Outcome]:
    """Build the CPU's compiled library where it is missing: without it host trees run in Python."""
    from outrider.kernels.cpu.product_library import library_path

    if library_path(folder) is not None:
        return []
    print("kernels/cpu/_products is missing: it is built beside all else", flush=True)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    limit_s = ends_at - time.monotonic()
    outcome = run_part("kernels/cpu/_products", command, limit_s=limit_s, quiet=True)
    if outcome.problem is None and library_path(folder) is None:
        problem = "not built, host trees run in Python; install a C++ compiler"
        outcome = replace(outcome, problem=problem)
    say(outcome)
    return [outcome]


def run_tests(ends_at: float, *, is_dry: bool = False) -> list[Outcome]:
    """All test files, several at a time, each a process of its own; dry: those for a GPU only."""
    jobs = [(file, "gpu and not long") for file in gpu_marked_tests()]
    if not is_dry:
        jobs = [*((file, "not long") for file in kernel_tests()), *jobs]

    def one(job: tuple[Path, str]) -> Outcome:
        file, marks = job
        name = str(file.relative_to(ROOT))
        left_s = ends_at - time.monotonic()
        if left_s <= 0.0:
            return Outcome(name=name, seconds=0.0, problem="skipped, no time left")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "cases.xml"
            command = pytest_command([file], "-m", marks, f"--junitxml={report}")
            outcome = run_part(name, command, limit_s=left_s, quiet=True)
            if report.exists():
                outcome.cases.update(case_seconds(report))
        say(outcome)
        return outcome

    with ThreadPoolExecutor(1 if is_dry else _TESTS_AT_ONCE) as pool:
        return list(pool.map(one, jobs))


def case_seconds(report: Path) -> dict[str, float]:
    """Return the seconds of each test of a JUnit report that was run."""
    cases = ElementTree.parse(report).iter("testcase")
    return {
        case.attrib["name"]: float(case.attrib["time"])
        for case in cases
        if case.find("skipped") is None
    }


def write_report(outcomes: Sequence[Outcome], folder: Path, *, is_dry: bool) -> Path:
    """Write how each part ended and what each case took; print the slowest cases."""
    import torch

    from benchmarks.gpu.gpu_report import device_slug, gpu_environment

    cases = [(took, part.name, name) for part in outcomes for name, took in part.cases.items()]
    for seconds, part, name in sorted(cases, reverse=True)[:_SHOWN_CASES]:
        print(f"{seconds:6.1f} s  {part}::{name}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {
        "environment": gpu_environment(device),
        "limits_s": [FIRST_S, SECOND_S],
        "parts": [
            {"name": one.name, "seconds": one.seconds, "problem": one.problem, "cases": one.cases}
            for one in outcomes
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu_check-{'dry' if is_dry else device_slug(device)}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def say(outcome: Outcome) -> None:
    """One line on a part, and its output where something is wrong."""
    last = outcome.output.strip().splitlines()[-1:] or [""]
    verdict = outcome.problem or "ok"
    print(f"{outcome.name}: {verdict} ({outcome.seconds:.0f} s) {last[0]}", flush=True)
    if outcome.problem is not None and outcome.output:
        print(outcome.output[-6000:], flush=True)


def run_benchmarks(ends_at: float, *, is_dry: bool, results: Path | None) -> list[Outcome]:
    """One after the other; what one leaves of its time goes to those behind it."""
    outcomes = []
    for place, benchmark in enumerate(BENCHMARKS):
        share = benchmark.share / sum(other.share for other in BENCHMARKS[place:])
        budget_s = (ends_at - time.monotonic()) * share
        if budget_s < _LEAST_S:
            outcomes.append(
                Outcome(name=benchmark.module, seconds=0.0, problem="skipped, no time left")
            )
            say(outcomes[-1])
            continue
        print(f"\n==== {benchmark.module}, {budget_s:.0f} s", flush=True)
        command = [
            *(sys.executable, "-m", f"benchmarks.gpu.{benchmark.module}"),
            *("--budget-s", f"{budget_s:.0f}"),
            *(["--dry"] if is_dry else []),
            *(["--results", str(results)] if results is not None else []),
        ]
        limit_s = inf if is_dry else budget_s + _GRACE_S
        outcome = run_part(benchmark.module, command, limit_s=limit_s, quiet=False)
        outcomes.append(outcome)
        say(outcome)
    return outcomes


def run_first(folder: Path, *, is_dry: bool) -> list[Outcome]:
    """Checks and first figures."""
    # No rented GPU waits for a dry run: it takes what it takes on a slow or busy machine.
    until_s = inf if is_dry else FIRST_S - _ENDING_S
    return run_gpu_first(folder, until_s, figures=False, is_dry=is_dry)


def run_second(folder: Path, results: Path | None, *, is_dry: bool) -> list[Outcome]:
    """Figures, tests, and benchmarks in the time that is left."""
    started_s = time.monotonic()
    outcomes = run_gpu_first(folder, inf if is_dry else _FIGURES_S, figures=True, is_dry=is_dry)
    print("\n==== tests", flush=True)
    tests_end_at = inf if is_dry else time.monotonic() + _TESTS_S
    outcomes += collect_tests(tests_end_at) if is_dry else []
    outcomes += run_tests(tests_end_at, is_dry=is_dry)
    ends_at = (time.monotonic() if is_dry else started_s) + SECOND_S - _ENDING_S
    return outcomes + run_benchmarks(ends_at, is_dry=is_dry, results=results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("first", "second", "both"), default="both")
    parser.add_argument("--dry", action="store_true", help="what can be run without a GPU")
    parser.add_argument("--out", type=Path, help="folder of gpu_first; default runs/gpu-check")
    parser.add_argument("--results", type=Path, help="folder for JSON; default benchmarks/results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and say how each of their steps ended."""
    arguments = _parser().parse_args(argv)
    is_dry = arguments.dry
    if not is_dry and not has_gpu():
        print("There is no GPU here; make gpu-check DRY=1 runs what needs none.")
        return 2
    if missing := missing_packages():
        print(f"{sys.executable} has no {', '.join(missing)}, which make gpu-check needs.")
        return 2
    folder = arguments.out or ROOT / "runs" / ("gpu-check-dry" if is_dry else "gpu-check")
    results = arguments.results
    if is_dry and results is None:
        results = folder  # an interpreter's times are no results
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(1) as beside:  # while kernels are compiled
        build = beside.submit(build_products, started_s + FIRST_S)
        if arguments.part != "second":
            outcomes += run_first(folder, is_dry=is_dry)
        if arguments.part != "first":
            outcomes += run_second(folder, results, is_dry=is_dry)
    outcomes += build.result()
    written = write_report(outcomes, results or ROOT / "benchmarks" / "results", is_dry=is_dry)
    print(f"\n==== report: {written}")
    return _ended(outcomes, time.monotonic() - started_s)


def _ended(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print what failed; the exit status."""
    failed = [outcome for outcome in outcomes if outcome.problem is not None]
    print(f"\n==== {len(outcomes)} parts, {seconds:.0f} s")
    for outcome in failed:
        print(f"{outcome.name}: {outcome.problem}")
    print("some parts failed" if failed else "all parts went well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
