"""A whole engine on ARM64, in an emulator: its answers are those of this processor."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT
from tests.kernels.cpu.emulated import arm_python
from tests.kernels.cpu.emulated.conftest import EMULATOR

_ANSWER = str(Path(__file__).parent / "answer.py")
_SOURCE = ROOT / ".ci" / "src"
_PROMPT = "What is 17 + 25?"


@pytest.fixture(scope="module")
def python_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python for ARM64 with torch; OUTRIDER_TEST_ARM_PYTHON names a folder that keeps it."""
    kept = os.environ.get("OUTRIDER_TEST_ARM_PYTHON")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("arm-python")
    try:
        arm_python.prepare(folder)
    except arm_python.UnavailableError as error:
        pytest.skip(f"an engine on ARM64 needs a Python for it: {error}")
    return folder


def _answers(command: list[str], library: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, _ANSWER, library, _PROMPT],
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
@pytest.mark.parametrize("processor", ["neoverse-n1", "max"])
def test_an_engine_on_arm_gives_the_same_answers(
    python_folder: Path, arm_library: Path, processor: str
) -> None:
    """With trees, without, and sampled; the small model drafts."""
    here = os.environ | {"PYTHONPATH": str(_SOURCE), "OUTRIDER_CPU": "avx2"}
    ours = _answers([sys.executable], "", dict(here))
    command = arm_python.command(python_folder, [EMULATOR, "-cpu", processor])
    theirs = _answers(command, str(arm_library), arm_python.environment(python_folder, _SOURCE))
    assert "NEON" in theirs["detail"]
    assert theirs["tokens"] == ours["tokens"]
    assert ours["tokens"]["greedy"] == ours["tokens"]["plain"]
