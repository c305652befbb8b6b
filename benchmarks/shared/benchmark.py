"""The base of all benchmarks: a script states its options, measurement, tables and goals.

What all scripts do alike is done here: the command line from a frozen dataclass, a quiet start in
the environment that serving gives its engine, the tables, the goals, the results file.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from benchmarks.shared.harness import (
    load_before,
    quiet_transformers,
    show_table,
    start,
    write_results,
)
from benchmarks.shared.harness import verdict as outcome
from benchmarks.shared.record import RESULTS, Summary

T = TypeVar("T")
Results = dict[str, Any]
"""Figures by name, as they are written to the file."""
Text = Callable[[Any], str]
"""Writes a cell of a table from the entry of its row."""


# ---- options ----------------------------------------------------------------------------------


def option(default: T, words: str = "", *, choices: Sequence[str] | None = None) -> T:
    """A field of an options class that is a flag of the command line, with its help."""
    made: Any = field(default=default, metadata={"help": words, "choices": choices})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of every benchmark."""

    repeats: int = option(3, "measured rounds")
    variant: str | None = option(None, "name of the results file's second part")
    results: Path = option(RESULTS, "where the file goes")


OptionsT = TypeVar("OptionsT", bound=Options)


def parse(
    kind: type[OptionsT], docstring: str | None, argv: Sequence[str] | None = None
) -> OptionsT:
    """Read the command line into an options class; the docstring becomes the help."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(kind)
    for each in fields(kind):
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, **_argument(hints[each.name], each))
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    return kind(**values)


def _argument(hint: Any, each: Field[Any]) -> dict[str, Any]:
    """Return argparse's keywords for a field of this type."""
    shared: dict[str, Any] = {"help": each.metadata.get("help") or None}
    if hint is bool:
        return {**shared, "action": "store_true"}
    shared |= {"default": each.default, "required": each.default is MISSING}
    if get_origin(hint) is Literal:
        return {**shared, "choices": get_args(hint)}
    (kind,) = {part for part in get_args(hint) or (hint,) if part not in (NoneType, Ellipsis)}
    if get_origin(hint) is tuple:
        shared["nargs"] = "+"
    return {**shared, "type": kind, "choices": each.metadata.get("choices")}


# ---- tables and goals -------------------------------------------------------------------------


def figure(key: str, spec: str = ".2f", *, part: str = "median", scale: float = 1.0) -> Text:
    """Write the figure of that name; the named part of a summary; nothing where there is none."""

    def text(entry: Mapping[str, Any]) -> str:
        value = entry.get(key)
        value = getattr(value, part) if isinstance(value, Summary) else value
        if isinstance(value, bool):
            return outcome(value)
        return "" if value is None else f"{value * scale:{spec}}"

    return text


def within(key: str, bound: float) -> Text:
    """Say whether the figure of that name, a summary's median, is at most so large."""

    def text(entry: Mapping[str, Any]) -> str:
        value = entry[key]
        return outcome((value.median if isinstance(value, Summary) else value) <= bound)

    return text


milliseconds: Final = partial(figure, scale=1e3)
"""Write a figure that is in seconds."""
microseconds: Final = partial(figure, scale=1e6)
count: Final = partial(figure, spec=".0f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A row an entry, its name in front; a column has its words and what it says."""

    title: str
    columns: Sequence[tuple[str, Text]]
    entries: Mapping[str, Any]
    caption: str = ""
    first: str = ""

    def show(self) -> None:
        """Print it."""
        names = [self.first, *(words for words, _ in self.columns)]
        rows = [
            [name, *(text(entry) for _, text in self.columns)]
            for name, entry in self.entries.items()
        ]
        show_table(self.title, names, rows, caption=self.caption)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound that a figure is to keep: at most, or at least."""

    words: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Return whether the figure keeps the bound."""
        over, under = self.measured >= self.bound, self.measured <= self.bound
        return over if self.at_least else under

    def record(self) -> dict[str, Any]:
        """For the results."""
        return {
            "goal": self.words,
            "measured": self.measured,
            "bound": self.bound,
            "met": self.is_met,
        }


_GOAL_COLUMNS: Final = (
    ("measured", figure("measured")),
    ("goal", figure("bound", "g")),
    ("met", figure("met")),
)


# ---- the script -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[OptionsT]):
    """A script: its docstring asks a question, `measure` returns the figures that answer it."""

    options: type[OptionsT]
    measure: Callable[[OptionsT], Results]
    tables: Callable[[OptionsT, Results], Iterable[Table]]
    variant: str | Callable[[OptionsT], str]
    """Names the results file where the command line does not."""
    goals: Callable[[Results], Sequence[Goal]] | None = None
    draw: Callable[[Results, Path], None] | None = None
    """Draws the figures into a PNG file beside the results."""

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Measure, show and write."""
        docstring = sys.modules[self.measure.__module__].__doc__
        options = parse(self.options, docstring, argv)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        quiet_transformers()
        arguments = vars(options) | {"load_before": load_before()}
        results = self.measure(options)
        self.show(options, results)
        if self.goals is not None:
            results["goals"] = [goal.record() for goal in self.goals(results)]
        script = Path(inspect.getfile(self.measure)).stem
        named = self.variant if isinstance(self.variant, str) else self.variant(options)
        path = write_results(script, options.variant or named, results, arguments)
        if self.draw is not None:
            self.draw(results, path.with_suffix(".png"))

    def show(self, options: OptionsT, results: Results) -> None:
        """Print the tables, and whether the goals are met."""
        for table in self.tables(options, results):
            table.show()
        if self.goals is not None:
            entries = {goal.words: goal.record() for goal in self.goals(results)}
            Table(title="goals", columns=_GOAL_COLUMNS, entries=entries).show()

    def start(self) -> None:
        """Run the script as a program."""
        start(self.main)
