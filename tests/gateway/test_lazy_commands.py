"""The commands' modules are imported when they are called, and `--help` says what they say."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from outrider.gateway.cli import COMMANDS, app

_HEAVY = {"torch", "transformers", "pydantic", "fastapi", "sqlalchemy", "httpx", "numpy", "zmq"}
_LIST_MODULES = """
import sys
sys.argv = ["outrider", "--help"]
from outrider.gateway.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def test_help_loads_nothing_but_the_list_of_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in COMMANDS)
    loaded = set(done.stderr.split())
    assert not loaded & _HEAVY
    ours = {name for name in loaded if name.partition(".")[0] == "outrider"}
    assert ours == {"outrider", "outrider.gateway", "outrider.gateway.cli"}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_own_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert f"{name} [OPTIONS]" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    group = typer.main.get_command(app)
    listed = group.commands[name]  # type: ignore[attr-defined]
    with listed.make_context(name, [], resilient_parsing=True) as context:
        first_paragraph = (context.command.help or "").strip().partition("\n\n")[0]
    assert " ".join(first_paragraph.split()) == listed.help
