"""The example of receipts, run as its page says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared.record import ROOT
from outrider.gateway.tools.demo.process import GatewayProcess

SCRIPT = ROOT / "examples/receipts/prove.py"


@pytest.mark.slow
def test_the_example_proves_and_finds_the_frauds(tmp_path: Path) -> None:
    key_file = tmp_path / "receipts.pem"
    flags = ("--large", "demo", "--small", "demo", "--set", f"receipts.key_file={key_file}")
    with GatewayProcess(flags) as gateway:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, "OUTRIDER_URL": gateway.start()},
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert key_file.exists()
    signed, honest, edited, changed, cheap = done.stdout.splitlines()
    assert signed == "the signature is that of a published key"
    assert honest.endswith("explanation: claimed")
    assert edited.endswith("explanation: edited text")
    assert "refused" in changed
    assert cheap.startswith("the small model's answer as the large one's")
