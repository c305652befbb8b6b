"""Installs clients and runs gateways for them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.wiring.application import build_app
from tests.gateway.clients.report import Report, Row
from tests.gateway.clients.scripted_model import scripted_by
from tests.gateway.conftest import parts_over, real_gateway, running
from tests.gateway.scripted_client import ScriptedClient

_CACHE: Final = Path(os.environ.get("OUTRIDER_CLIENTS") or Path.home() / ".cache/outrider/clients")
_PROGRAMS: Final = Path(__file__).parent / "programs"
_PAGE: Final = Path(__file__).parents[3] / "docs" / "clients.md"
_TIMEOUT_S: Final = 240
_QUIET: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A client's run: what it printed, and its exit status."""

    text: str
    status: int

    @property
    def last_json(self) -> dict[str, Any]:
        """The object on the last line."""
        found: dict[str, Any] = json.loads(self.text.strip().splitlines()[-1])
        return found


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def scripted_url(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """A gateway with the default settings over a scripted model with room for any prompt."""
    engine = ScriptedClient(
        vocab_size=420, max_context=400_000, script=scripted_by(tokenizer, encode)
    )
    limits = GatewayLimits(default_max_tokens=4096, max_body_bytes=32_000_000)
    parts = parts_over(engine, tokenizer, limits=limits, unknown_fields="ignore")
    with running(build_app(parts)) as url:
        yield url
    assert not engine.running


@pytest.fixture(scope="session")
def pair_url() -> Iterator[str]:
    """The bundled pair with the default settings."""
    with real_gateway() as url:
        yield url


@pytest.fixture(scope="session")
def npm() -> Callable[[str], Path]:
    """Install an npm package, once; returns the folder of the installed programs."""

    def install(package: str) -> Path:
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        folder = _CACHE / "npm" / package.strip("@").replace("/", "+").replace(" ", "+")
        if not (folder / "done").exists():
            wanted = package.split()
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            subprocess.run([*command, *wanted], check=True, stdout=subprocess.DEVNULL)
            for script in folder.glob("node_modules/opencode-ai/postinstall.mjs"):
                subprocess.run(["node", script.name], check=True, cwd=script.parent)
            (folder / "done").touch()
        return folder / "node_modules"

    return install


@pytest.fixture(scope="session")
def pip() -> Callable[[str], Path]:
    """Install PyPI packages into an environment of their own, once; returns its bin folder."""

    def install(packages: str) -> Path:
        folder = _CACHE / "pip" / packages.split("==")[0].split("[")[0]
        if not (folder / "done").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            command = [str(folder / "bin/pip"), "install", "--quiet", *packages.split()]
            subprocess.run(command, check=True, cwd=folder)
            (folder / "done").touch()
        return folder / "bin"

    return install


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a client in a home and a folder of its own."""

    def start(*command: str | Path, env: Mapping[str, str]) -> Ran:
        own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **_QUIET, **env}
        done = subprocess.run(
            [str(part) for part in command],
            env=own,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return Ran(text=done.stdout, status=done.returncode)

    return start


@pytest.fixture(scope="session")
def programs() -> Path:
    """Programs that use a client as its documentation does."""
    return _PROGRAMS


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """Rows of the table in docs/clients.md, which is written where all clients ran."""
    rows: dict[str, Row] = {}
    yield Report(rows)
    Report(rows).write(_PAGE)
