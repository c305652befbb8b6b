"""Check what is said where an optional package is missing, and what the base imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.gateway.settings.extras import MissingExtraError, need_extra
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.wiring.start import check_extras

UPSTREAM = {"models.large": "none", "models.small": "none", "tiers.a.url": "http://127.0.0.1:9/v1"}
OPTIONAL = "torch triton transformers tokenizers llguidance sklearn scipy threadpoolctl gguf tqdm"

# Importing any of them fails as if it were not installed; then a gateway is built.
WITHOUT = f"""
import sys
for name in {OPTIONAL.split()}:
    sys.modules[name] = None
import outrider.gateway.cli, outrider.gateway.wiring.serving, outrider.gateway.wiring.upstream
import outrider.gateway.tools.commands.keys_cli
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.start import check_models
check_models(load_settings(flags={UPSTREAM}, environ={{}}, config_file=None))
"""


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_gateway_before_other_servers_needs_no_extra() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ({}, "engine"),
        ({"engine.replicas": "tcp://127.0.0.1:7600"}, "tokenize"),
        (UPSTREAM | {"experiments.x.arms": {"control": {}, "b": {}}}, "experiments"),
    ],
)
def test_what_is_missing_is_said_with_the_command(
    flags: dict[str, object], extra: str, empty_path: Path
) -> None:
    settings = load_settings(flags=flags, environ={}, config_file=None)
    with pytest.raises(MissingExtraError, match=rf'pip install "outrider\[{extra}\]"$'):
        check_extras(settings)


def test_what_is_half_installed_is_missing(empty_path: Path) -> None:
    (empty_path / "torch").mkdir()
    for name in ("transformers", "tokenizers", "llguidance"):
        (empty_path / f"{name}.py").touch()
    with pytest.raises(MissingExtraError, match=r"not installed here \(torch\)"):
        need_extra("engine", "A model")


def test_a_process_that_keeps_torch_out_knows_that_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as keep_torch_out does
    check_extras(load_settings(flags={}, environ={}, config_file=None))


def test_doctor_names_the_extra(empty_path: Path) -> None:
    settings = load_settings(flags={}, environ={}, config_file=None)
    found = next(one for one in examine(settings) if "not installed here" in one.detail)
    assert (found.name, found.status) == ("packages", "failed")
    assert found.advice == 'Run pip install "outrider[engine]"'
