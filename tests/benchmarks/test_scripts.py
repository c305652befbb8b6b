"""benchmarks/README.md lists every script, and `make bench` runs every benchmark that it can."""

import re
from pathlib import Path
from typing import Final

from benchmarks.run_all import JOBS
from tests.docs.markdown import ROOT

_FOLDER: Final = ROOT / "benchmarks"
_PAGE: Final = (_FOLDER / "README.md").read_text(encoding="utf-8")
_ROWS: Final = set(re.findall(r"^\| ((?:\w+/)?\w+) \| (?!question)", _PAGE, re.MULTILINE))


def _name(file: Path) -> str:
    return file.relative_to(_FOLDER).with_suffix("").as_posix()


def test_each_script_has_its_row() -> None:
    """A script is what can be run and says how; others are run by scripts."""
    scripts = {
        _name(file)
        for file in _FOLDER.rglob("*.py")
        if "__main__" in (text := file.read_text(encoding="utf-8"))
        and (file.name.startswith("bench_") or "python -m benchmarks." in text.split('"""')[1])
    }
    assert scripts <= _ROWS


def test_each_row_is_a_script() -> None:
    assert {row for row in _ROWS if not (_FOLDER / f"{row}.py").is_file()} == set()


def test_run_all_has_each_benchmark_that_needs_no_gpu() -> None:
    benches = {file for file in _FOLDER.rglob("bench_*.py") if file.parent.name != "gpu"}
    assert {file.stem for file in benches} == {job.script for job in JOBS}
