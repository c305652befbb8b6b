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
_PRODUCT = {**os.environ, "PYTHONPATH": str(_SOURCE)}
_OLDER = {"OUTRIDER_CPU": "avx2", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
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


def _answers(
    command: list[str], library: str, environment: dict[str, str], *how: str
) -> dict[str, Any]:
    done = subprocess.run(
        [*command, _ANSWER, library, _PROMPT, *how],
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
    ours = _answers([sys.executable], "", _PRODUCT | {"OUTRIDER_CPU": "avx2"})
    command = arm_python.command(python_folder, [EMULATOR, "-cpu", processor])
    theirs = _answers(command, str(arm_library), arm_python.environment(python_folder, _SOURCE))
    assert "NEON" in theirs["detail"]
    assert theirs["tokens"] == ours["tokens"]
    assert ours["tokens"]["greedy"] == ours["tokens"]["plain"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["", "int8"])
def test_portable_numerics_are_those_of_arm(
    python_folder: Path, arm_library: Path, scheme: str
) -> None:
    """On a processor that has products of bfloat16 of its own, with which it would not be so."""
    here = _answers([sys.executable], "", _PRODUCT, "portable", scheme)
    command = arm_python.command(python_folder, [EMULATOR, "-cpu", "max"])
    environment = arm_python.environment(python_folder, _SOURCE)
    there = _answers(command, str(arm_library), environment, "portable", scheme)
    assert "portable, by NEON_DOT" in there["detail"]
    assert (there["numerics"], there["tokens"]) == (here["numerics"], here["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "int8"])
def test_portable_numerics_are_those_of_an_older_x86(scheme: str) -> None:
    """Torch's own operations are those of a processor with less, too."""
    here, there = (
        _answers([sys.executable], "", _PRODUCT | changes, "portable", scheme)
        for changes in ({}, _OLDER)
    )
    if "portable" not in here["detail"]:
        pytest.skip("no compiled products run here")
    assert (there["numerics"], there["tokens"]) == (here["numerics"], here["tokens"])
