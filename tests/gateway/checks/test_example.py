"""The example of checks, run as its page says."""

import os
import subprocess
import sys

import pytest

from benchmarks.shared.record import ROOT
from outrider.gateway.tools.demo.process import GatewayProcess

FOLDER = ROOT / "examples/checks"


@pytest.mark.slow
def test_the_example_blocks_and_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / ".ci/src"), str(ROOT)]))
    flags = ("--config", str(FOLDER / "checks.toml"), "--large", "demo", "--small", "demo")
    with GatewayProcess(flags) as gateway:
        done = subprocess.run(
            [sys.executable, str(FOLDER / "try_checks.py")],
            env={**os.environ, "OUTRIDER_URL": gateway.start()},
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    refused, *story = done.stdout.splitlines()
    assert refused.startswith("content_filter: ")
    assert "We give no advice on lock picking." in refused
    assert "___" in " ".join(story)
    assert " the " not in " ".join(story)
