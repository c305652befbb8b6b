"""`outrider` is the only name that the product takes, and is imported by."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.shared.record import ROOT
from outrider.gateway.tools.demo.process import GatewayProcess

FOLDERS = {"gateway", "router", "draft", "verifier", "engine", "kernels"}
# As the gateway and its engine import when they start, and as Ray and the tools do.
PROGRAM = """
import sys
import outrider.gateway.cli, outrider.gateway.wiring.serving
import outrider.gateway.engines.backends.engine_process
from outrider.gateway.wiring.build import import_engine
import_engine()
print(*sys.modules)
"""
DATA = (
    *("gateway/settings/*.json", "gateway/http/server/static/*.html"),
    "gateway/http/server/static/admin/*.js",
    *("gateway/tools/reports/report.html", "gateway/tools/reports/report.css"),
    "gateway/storage/migrations/script.py.mako",
    *("draft/pair/*/model.safetensors", "draft/pair/*/tokenizer.json"),
)


@pytest.fixture
def app_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with an app's own files, which ends whatever imports them."""
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the app was imported: {name}')\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("app_folder")
def test_nothing_is_imported_by_another_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "outrider" in loaded
    assert not loaded & FOLDERS


@pytest.mark.slow
@pytest.mark.usefixtures("app_folder")
def test_a_gateway_answers_beside_an_apps_files() -> None:
    with GatewayProcess(["--large", "demo", "--small", "demo"]) as gateway:
        body = {"model": "auto", "messages": [{"role": "user", "content": "2 + 2?"}]}
        answer = httpx.post(f"{gateway.start()}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_a_wheel_takes_one_name(tmp_path: Path) -> None:
    """Packages and their data, as a wheel gets them; without the compiled products."""
    command = ["setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    made = tmp_path / "made"
    subprocess.run(
        [sys.executable, *command, "build_py", "--build-lib", str(made)], cwd=ROOT, check=True
    )
    assert [path.name for path in made.iterdir()] == ["outrider"]
    assert {path.name for path in (made / "outrider").iterdir()} == FOLDERS
    assert {path.parent.name for path in (made / "outrider").glob("*/py.typed")} == FOLDERS
    for pattern in DATA:
        assert [*(made / "outrider").glob(pattern)], pattern
    listed = {path.relative_to(made / "outrider") for path in made.rglob("*.py")}
    own = {path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert listed == own
