"""Installing without a compiler: the build goes on, models answer, and doctor says so in a line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("draft", "engine", "gateway", "kernels", "router", "verifier")
# Both tiers, in float32 and rounded: what torch's products have to do in the compiled ones' place.
ANSWER = """
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.doctor.doctor import _products
from tests.engines import PAIR_FOLDER
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner

found = _products(load_settings(environ={}, flags={"engine.device": "cpu"}))
print(found.status, found.detail)
for tier, rounding in (("small", None), ("large", Rounding(scheme="int8"))):
    model = load_model(str(PAIR_FOLDER / tier), rounding=rounding)
    runner = ModelRunner(model=model, num_blocks=8, block_size=16)
    view, ids = runner.new_view(""), [5, 6, 7]
    view.reserve(16)
    start = 0
    while len(ids) < 12:
        piece = ForwardSlice(view=view, token_ids=ids[start:], start_slot=start, num_logit_rows=1)
        start = len(ids)
        logits = runner.forward([piece]).logits
        assert logits.isfinite().all()
        ids.append(int(logits[-1].argmax()))
    print(tier, len(ids))
"""


@pytest.mark.slow
def test_nothing_needs_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="the doctor reads the gateway's settings")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    environ = os.environ | {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    built = run([sys.executable, "setup.py", "build_ext", "--inplace"], tmp_path, environ)
    assert built.returncode == 0, built.stderr
    assert not list(tmp_path.rglob("_products*.so"))
    # `tests` comes from here, and all else from the copy.
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "outrider").symlink_to(tmp_path)
    environ["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "src"), str(ROOT)))
    answered = run([sys.executable, "-c", ANSWER], tmp_path, environ)
    assert answered.returncode == 0, answered.stderr
    first, *others = answered.stdout.splitlines()
    assert "torch's" in first
    assert others == ["small 12", "large 12"]


def run(
    command: list[str], folder: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, and wait for it."""
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
