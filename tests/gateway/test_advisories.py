"""No tested version of a package has a known hole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_no_pinned_version_has_an_advisory(tmp_path: Path) -> None:
    """Asks the package index for the advisories of constraints.txt."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    installed = run(python, "-m", "pip", "install", "--quiet", "--no-input", "pip-audit")
    if installed.returncode:
        pytest.skip(f"pip could not install pip-audit: {installed.stderr.strip()[-300:]}")
    options = ["--requirement", "constraints.txt", "--no-deps", "--disable-pip", "--format", "json"]
    done = run(python, "-m", "pip_audit", "--progress-spinner", "off", *options)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pip-audit could not ask the index: {done.stderr.strip()[-300:]}")
    packages = json.loads(done.stdout)["dependencies"]
    audited = [one for one in packages if "skip_reason" not in one]
    if not audited:
        pytest.skip(f"the index tells no advisories: {packages[0]['skip_reason']}")
    holes = {
        f"{one['name']} {one['version']}": [hole["id"] for hole in one["vulns"]] for one in audited
    }
    assert {name: ids for name, ids in holes.items() if ids} == {}
