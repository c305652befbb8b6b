"""The tables that `outrider experiment` prints for people."""

import json
import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.experiments.records import ExperimentEvent, ExperimentRecord

_STYLES = {"running": "green", "draft": "yellow", "stopped": "red"}


def print_experiments(console: Console, records: Sequence[ExperimentRecord]) -> None:
    """Print a row for each experiment."""
    if not records:
        console.print(
            "There are no experiments yet. Create one: outrider experiment create NAME --arm ..."
        )
        return
    table = _table("name", "version", "state", "share", "layer", "unit", "metric", "arms")
    for record in records:
        spec = record.spec
        table.add_row(
            Text(record.name),
            Text(str(record.version)),
            Text(record.state, style=_STYLES[record.state]),
            Text(f"{record.share:.4g}"),
            Text(spec.layer),
            Text(spec.unit),
            Text(spec.metric),
            Text(", ".join(_arm(record, arm) for arm in spec.arms)),
        )
    console.print(table)


def print_experiment(
    console: Console, record: ExperimentRecord, events: Sequence[ExperimentEvent]
) -> None:
    """Print one experiment, its arms, and its changes."""
    print_experiments(console, [record])
    if record.spec.description:
        console.print(Text(record.spec.description))
    arms = _table("arm", "share", "sets", "stopped")
    for arm in record.spec.arms:
        stop = record.current.stopped_arms.get(arm)
        arms.add_row(
            Text(f"{arm} (control)" if arm == record.control else arm),
            Text(f"{record.current.weights[arm]:.2%}"),
            Text(json.dumps(record.spec.overlay(arm).document())),
            Text("-" if stop is None else f"{_moment(stop.at)}: {stop.reason}"),
        )
    console.print(arms)
    history = _table("when (UTC)", "version", "what", "detail")
    for event in events:
        row = (_moment(event.at), str(event.version), event.kind.replace("_", " "), event.detail)
        history.add_row(*(Text(cell) for cell in row))
    console.print(history)


def _arm(record: ExperimentRecord, arm: str) -> str:
    is_stopped = arm in record.current.stopped_arms
    return f"{arm} {record.current.weights[arm]:.0%}{' stopped' if is_stopped else ''}"


def _moment(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
