"""The example of batches, run as its page says, on a gateway that is started again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.shared.record import ROOT
from outrider.gateway.tools.demo.process import GatewayProcess

SCRIPT = ROOT / "examples/batch/ask_all.py"


def run(url: str, **more: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "OUTRIDER_URL": url, **more},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_example_asks_everything_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    flags = (
        *("--large", "demo", "--small", "demo", "--set", "batches.enabled=true"),
        *("--set", f"database_url=sqlite:///{tmp_path}/outrider.db"),
    )
    with GatewayProcess(flags) as gateway:
        first, *answers, status, tokens = run(gateway.start())
    begun = re.fullmatch(r"batch: (batch_\w+)", first)
    assert begun
    assert [line.partition(": ")[0] for line in answers if line.startswith("question-")] == [
        f"question-{n}" for n in (1, 2, 3)
    ]
    assert status == "completed: 3 of 3"
    assert re.fullmatch(r"tokens: [1-9]\d* in, [1-9]\d* out", tokens)
    with GatewayProcess(flags) as gateway:
        url = gateway.start()
        assert run(url, BATCH=begun[1])[-2:] == [status, tokens]
        usage = httpx.get(f"{url}/v1/usage", params={"by": "kind"}).json()
        assert usage
