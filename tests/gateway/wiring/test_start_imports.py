"""A start of the bundled pair loads no library that serves another configuration."""

import subprocess
import sys

import pytest

_GATEWAY = """
import sys
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.start import keep_torch_out
settings = load_settings(environ={}, flags={"database_url": "sqlite:///" + sys.argv[1]})
keep_torch_out()
import outrider.gateway.wiring.serving
from outrider.gateway.engines.backends.absent import AbsentEngine
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.build import build_parts
build_app(build_parts(settings, AbsentEngine()))
print(*sys.modules)
"""
_ENGINE = """
import sys
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.build import build_engine
flags = {"speculation.adaptive": False, "engine.device": "cpu", "engine.num_blocks": 64}
engine = build_engine(load_settings(environ={}, flags=flags), lambda stage, fraction: None)
print(*sys.modules)
"""


def _loaded(script: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_gateway(tmp_path: object) -> None:
    others = {"scipy", "sklearn", "aiohttp", "httpx", "transformers", "huggingface_hub", "redis"}
    assert not _loaded(_GATEWAY, f"{tmp_path}/outrider.db") & others


@pytest.mark.slow
def test_the_engine() -> None:
    loaded = _loaded(_ENGINE)
    assert "llguidance" in loaded
    assert not loaded & {"transformers", "huggingface_hub", "fastapi", "sqlalchemy", "sklearn"}


def test_an_engines_process_before_it_builds_the_engine() -> None:
    loaded = _loaded(
        "import sys, outrider.gateway.engines.backends.engine_process; print(*sys.modules)"
    )
    assert not loaded & {"torch", "pydantic", "outrider.gateway.settings.tree"}
