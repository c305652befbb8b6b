"""A command's flags are the fields of a dataclass, and a flag that is not given sets nothing."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outrider.gateway.tools.commands import engine_command
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    name: Annotated[str, typer.Argument()]
    size: Annotated[int, typer.Option("--size", "-s", min=1), Sets("toy.size")] = 3
    parts: Annotated[list[str] | None, typer.Option("--part"), Sets("toy.parts")] = None
    is_new: Annotated[bool | None, typer.Option("--new/--old"), Sets("toy.new")] = None


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @takes_flags
    def show(toy: Toy, last: Annotated[str, typer.Option()] = "z") -> None:
        typer.echo(f"{toy.name} {last} {setting_flags(toy)}")

    return app


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["a"], "a z {'toy.size': 3}"),
        (["a", "-s", "5", "--old", "--last", "y"], "a y {'toy.size': 5, 'toy.new': False}"),
        (["a", "--part", "x", "--part", "y"], "a z {'toy.size': 3, 'toy.parts': ('x', 'y')}"),
    ],
)
def test_fields_are_flags(app: typer.Typer, arguments: list[str], printed: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.output.strip()) == (0, printed)


def test_a_flags_bounds_and_its_place_hold(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["a", "--size", "0"]).exit_code == 2
    assert CliRunner().invoke(app, []).exit_code == 2
    told = CliRunner().invoke(app, ["--help"]).output
    assert told.index("--size") < told.index("--part") < told.index("--last")


def test_two_fields_of_one_name_are_refused() -> None:
    def clash(first: Toy, second: Toy) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):
        takes_flags(clash)


def test_a_flag_that_is_not_given_leaves_what_set_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(engine_command, "_run", lambda settings, *_, **__: seen.append(settings))
    arguments = ["--set", "engine.device=cpu", "--set", "engine.num_threads=3"]
    done = CliRunner().invoke(engine_command.app, [*arguments, "--num-threads", "2"])
    assert done.exit_code == 0, done.output
    assert (seen[0].engine.device, seen[0].engine.num_threads) == ("cpu", 2)
