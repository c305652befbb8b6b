"""A frozen dataclass as a command's flags: name, type, default, help and setting, said once.

A field's annotation holds its `typer.Option`, and the `Sets` that the flag sets, if any:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class EngineFlags:
        device: Annotated[
            str | None, typer.Option(help="auto, cpu or cuda."), Sets("engine.device")
        ] = None

    @app.command()
    @takes_flags
    def serve(engine: EngineFlags) -> None:
        settings = load_settings(flags=setting_flags(engine))
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sets:
    """The setting that a flag sets, such as `engine.device`."""

    name: str


def takes_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Let typer see the fields of a parameter that is a dataclass in that parameter's place."""
    signature = inspect.signature(command)
    plain = signature.parameters.values()
    groups: dict[str, Any] = {
        one.name: one.annotation for one in plain if is_dataclass(one.annotation)
    }
    parameters = [
        shown.replace(kind=Parameter.KEYWORD_ONLY)
        for one in plain
        for shown in (_parameters(one.annotation) if one.name in groups else (one,))
    ]

    @functools.wraps(command)
    def with_flags(**given: Any) -> Result:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    seen: Any = with_flags
    seen.__signature__ = signature.replace(parameters=parameters)
    seen.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


def setting_flags(*groups: Any) -> dict[str, Any]:
    """Return the settings that were given, by their names. Lists become tuples."""
    return {
        mark.name: tuple(value) if isinstance(value, list) else value
        for group in groups
        for name, hint in _hints(type(group)).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Sets) and (value := getattr(group, name)) not in (None, [])
    }


def _parameters(group: Any) -> Iterator[Parameter]:
    """Give a parameter for each field, in their order."""
    hints = _hints(group)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


def _hints(group: type[Any]) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)
