"""The example of an A/B experiment, run as its page says: size, arms over models, report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared.record import ROOT
from outrider.gateway.tools.demo.process import GatewayProcess

SCRIPT = ROOT / "examples/experiments/compare_models.py"
BUNDLED = ("--large", "demo", "--small", "demo")


@pytest.mark.slow
def test_the_example_comes_to_a_verdict(tmp_path: Path) -> None:
    database_url = f"sqlite:///{tmp_path}/outrider.db"
    page = tmp_path / "report.html"
    with GatewayProcess([*BUNDLED, "--set", f"database_url={database_url}"]) as gateway:
        environ = {
            **os.environ,
            "OUTRIDER_URL": gateway.start(),
            "OUTRIDER_DATABASE_URL": database_url,
            "REPORT": str(page),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=environ, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small is better than the control by mean end-to-end time" in done.stdout
    assert "80% of experiments" in done.stdout
    text = page.read_text(encoding="utf-8")
    for word in ("small is better", "small against control", "<svg", "decides: e2e"):
        assert word in text
