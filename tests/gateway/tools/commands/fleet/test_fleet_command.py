"""`outrider fleet`: its help, its example, and the table of what runs."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from outrider.gateway.tools.commands.fleet.fleet_command import app
from outrider.gateway.tools.commands.fleet.status import engines_table
from outrider.gateway.wiring.ray.plan import EXAMPLE, EnginePlan


def deployment(state: str, message: str = "", **replicas: int) -> Any:
    return SimpleNamespace(
        status=SimpleNamespace(value=state), message=message, replica_states=replicas
    )


def shown(deployments: dict[str, Any], known: dict[str, Any]) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=200).print(engines_table(deployments, known))
    return output.getvalue().splitlines()


def test_the_table_says_what_runs_where_and_what_waits() -> None:
    both = EnginePlan(large="org/large", small="org/small", max_replicas=4)
    on_demand = EnginePlan(large="org/huge", min_replicas=0, max_replicas=2)
    heading, first, second, third = shown(
        {
            "directory": deployment("HEALTHY", RUNNING=1),
            "chat": deployment("UPSCALING", "Upscaling from 1 to 2.", RUNNING=1, STARTING=1),
            "huge": deployment("HEALTHY"),
        },
        {
            "chat": (both, ["tcp://10.0.0.5:7601", "tcp://10.0.0.6:7602"]),
            "huge": (on_demand, []),
        },
    )
    assert heading.split() == ["engines", "models", "replicas", "bounds", "state", "addresses"]
    assert "1 running, 1 starting" in first
    assert "1 to 4" in first
    assert "upscaling: Upscaling from 1 to 2." in first
    assert first.rstrip().endswith("tcp://10.0.0.5:7601")
    assert second.split() == ["org/small", "tcp://10.0.0.6:7602"]
    assert "none until a request comes" in third


def test_without_its_directory_what_serve_knows_is_shown() -> None:
    _, line = shown({"chat": deployment("UNHEALTHY", "it crashed", RUNNING=1)}, {})
    assert line.split() == ["chat", "1", "running", "unhealthy:", "it", "crashed"]


def test_the_help_has_examples_and_the_example_is_printed() -> None:
    run = CliRunner()
    helped = run.invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    for name in ("keygen", "example > fleet.toml", "up fleet.toml", "status", "down", "--engines"):
        assert name in helped
    assert run.invoke(app, ["example"]).output == EXAMPLE
