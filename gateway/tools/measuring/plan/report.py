"""A plan for people, in a terminal and as a page, and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.gateway.tools.commands.terminal import print_whole
from outrider.gateway.tools.measuring.plan.capacity import (
    Capacity,
    CapacityRow,
    Goal,
    MemoryUse,
    users_that_fit,
)
from outrider.gateway.tools.measuring.plan.check import PredictedFigure
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes
from outrider.gateway.tools.measuring.plan.simulation_figures import SimulationFigures
from outrider.gateway.tools.measuring.plan.workload import LengthPairs
from outrider.gateway.tools.reports.charts import Axis, lines_by_case
from outrider.gateway.tools.reports.grids import Grid
from outrider.gateway.tools.reports.page import LATENCY_TERMS, figure, figures, notes, page

_GB = 1e9
_MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Everything that was planned. `notes` say what it rests on, and what it leaves out.

    `num_kv_tokens`: of each tier's KV cache, by tier, the large one first. `memory`: of each
    device, where they are known by a data sheet.
    """

    device: str
    is_measured: bool
    shapes: Sequence[ModelSizes]
    num_kv_tokens: Mapping[str, int]
    lengths: LengthPairs
    window: int | None
    goal: Goal
    memory: Sequence[MemoryUse] = ()
    usd_per_hour: float | None
    capacities: Sequence[Capacity]
    compared: Sequence[PredictedFigure] = ()
    notes: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """JSON. Times are seconds, sizes bytes."""
        return {
            "device": self.device,
            "is_measured": self.is_measured,
            "models": [asdict(shape) for shape in self.shapes],
            "memory": [{**asdict(use), "free_bytes": use.free_bytes} for use in self.memory],
            "num_kv_tokens": dict(self.num_kv_tokens),
            "num_users_that_fit": self.num_answers(),
            "window": self.window,
            "lengths": {
                "name": self.lengths.name,
                "mean_prompt": self.lengths.mean_prompt,
                "mean_answer": self.lengths.mean_answer,
                "mean_held": self.lengths.mean_held,
            },
            "goal": asdict(self.goal),
            "usd_per_hour": self.usd_per_hour,
            "variants": [_variant(capacity) for capacity in self.capacities],
            "compared": [{**asdict(one), "error": one.error} for one in self.compared],
            "notes": list(self.notes),
        }

    def num_answers(self) -> dict[str, int]:
        """Count how many answers fit into each tier's cache at once, by tier."""
        return {
            tier: users_that_fit(number, self.lengths, self.window)
            for tier, number in self.num_kv_tokens.items()
        }

    def kv_line(self) -> str:
        """Say what each tier's cache holds, and how much of the memory it takes."""
        answers = self.num_answers()
        parts = [
            f"{tier}: {number:,} tokens ({number * shape.kv_bytes_per_token / _GB:.1f} GB), "
            f"[bold]{answers[tier]:,} answers fit at the same time[/bold]"
            for (tier, number), shape in zip(self.num_kv_tokens.items(), self.shapes, strict=True)
        ]
        return "KV cache: " + "; ".join(parts)


def _variant(capacity: Capacity) -> dict[str, Any]:
    return {
        "name": capacity.variant.name,
        "by_concurrency": [_line(line) for line in capacity.lines],
        "best_rate_per_s": capacity.best_rate_per_s,
        "at_best_rate": None if capacity.best is None else _line(capacity.best),
    }


def _line(line: CapacityRow) -> dict[str, Any]:
    figures = {**asdict(line.figures), "goodput_per_s": line.figures.goodput_per_s}
    return {"num_users": line.num_users, **figures, "usd_per_million": line.usd_per_million}


def print_plan(console: Console, plan: CapacityPlan) -> None:
    """Tables: the models, each variant by concurrency, the variants side by side, the check."""
    for title, grid in _models(plan):
        print_whole(console, grid.terminal(title))
    console.print(_words(plan))
    for title, grid in _results(plan):
        print_whole(console, grid.terminal(title))
    for note in plan.notes:
        console.print(f"[dim]- {note}[/dim]", highlight=False)


def plan_page(plan: CapacityPlan) -> str:
    """Return the same as a page, with charts of what each variant carries."""
    words = Text.from_markup(_words(plan)).plain
    parts = [figures(_figures(plan))]
    parts += [f"<h2>{escape(title)}</h2>\n{grid.html()}" for title, grid in _results(plan)]
    parts += [f"<h2>{escape(title)}</h2>\n{grid.html()}" for title, grid in _models(plan)]
    return page(
        title=f"Capacity of {plan.device}",
        subtitle=", ".join(shape.name for shape in plan.shapes),
        lead=words,
        body="\n".join([*parts, *notes(plan.notes)]),
        terms={term: words for term, words in LATENCY_TERMS.items() if term != "Intervals"},
    )


def _words(plan: CapacityPlan) -> str:
    text = (
        f"{plan.kv_line()}. Requests of {plan.lengths.name}: prompt "
        f"{plan.lengths.mean_prompt:.0f}, answer {plan.lengths.mean_answer:.0f}."
    )
    if len(plan.num_kv_tokens) > 1:
        text += (
            "\n[dim]engine.small_kv_ratio shares it: 1 where every large answer is drafted for "
            "however many there are, more for large answers below.[/dim]"
        )
    return text


def _figures(plan: CapacityPlan) -> Iterator[str]:
    """The figures of each variant, by the number of users."""
    found: dict[float, dict[str, SimulationFigures]] = {}
    for capacity in plan.capacities:
        for line in capacity.lines:
            found.setdefault(line.num_users, {})[capacity.variant.name] = line.figures
    users = Axis("users, each of whom asks again when answered", scale="log", ticks=list(found))
    for title, pick in (
        ("Tokens per second.", lambda one: one.tokens_per_s),
        ("Time to first token, p95, milliseconds.", lambda one: _MS * one.ttft_p95_s),
    ):
        yield figure(lines_by_case(title, found, users, pick), title, "")


_Titled = Iterator[tuple[str, Grid]]


def _models(plan: CapacityPlan) -> _Titled:
    """The models, and the memory of each device."""
    how = "measured here" if plan.is_measured else "by its data sheet, not measured"
    rows = [
        [
            shape.name,
            f"{shape.num_parameters / 1e6:,.1f} M",
            f"{shape.weight_bytes / _GB:.3f}",
            f"{shape.kv_bytes_per_token:,}",
        ]
        for shape in plan.shapes
    ]
    head = ["model", "parameters", "weights GB", "KV bytes a token"]
    yield f"{plan.device} ({how})", Grid(head=head, rows=rows)
    if plan.memory:
        head = ["device", "weights", "KV cache", "largest pass", "free"]
        yield "memory of each device, GB", Grid(head=head, rows=list(map(_memory, plan.memory)))


def _memory(use: MemoryUse) -> list[str]:
    parts = (use.weight_bytes, use.kv_bytes, use.pass_bytes, use.free_bytes)
    return [use.device, *(f"{part / _GB:.2f}" for part in parts)]


def _results(plan: CapacityPlan) -> _Titled:
    """Each variant, all of them side by side, and the check."""
    for capacity in plan.capacities:
        yield capacity.variant.name, _by_concurrency(capacity)
    yield _side_by_side(plan)
    if plan.compared:
        rows = [
            [
                f"{one.name}, {one.unit}",
                f"{one.predicted:.2f}",
                f"{one.measured:.2f}",
                f"{one.error:+.0%}",
            ]
            for one in plan.compared
        ]
        head = ["figure", "predicted", "measured", "error"]
        yield "beside the measured run", Grid(head=head, rows=rows)


def _by_concurrency(capacity: Capacity) -> Grid:
    head = ["users", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95", "tokens/s", "attained"]
    has_price = any(line.usd_per_million is not None for line in capacity.lines)
    rows = []
    for line in capacity.lines:
        found = line.figures
        row = [
            str(line.num_users),
            *(f"{_MS * s:.1f}" for s in (found.ttft_p50_s, found.ttft_p95_s)),
            *(f"{_MS * s:.2f}" for s in (found.tpot_p50_s, found.tpot_p95_s)),
            f"{found.tokens_per_s:,.0f}",
            f"{found.attainment:.0%}",
        ]
        rows.append([*row, _usd(line)] if has_price else row)
    return Grid(head=[*head, "USD/M tokens"] if has_price else head, rows=rows)


def _usd(line: CapacityRow) -> str:
    return "" if line.usd_per_million is None else f"{line.usd_per_million:.3f}"


def _side_by_side(plan: CapacityPlan) -> tuple[str, Grid]:
    goal = plan.goal
    wanted = [
        f"{name} <= {_MS * seconds:g} ms"
        for name, seconds in (("TTFT", goal.ttft_s), ("TPOT", goal.inter_token_s))
        if seconds is not None
    ]
    title = f"highest rate at which {goal.attainment:.0%} attain {' and '.join(wanted) or 'it'}"
    first = next((c.best_rate_per_s for c in plan.capacities if c.best_rate_per_s), None)
    rows = []
    for capacity in plan.capacities:
        best, rate = capacity.best, capacity.best_rate_per_s
        if best is None or rate is None:
            rows.append([capacity.variant.name, "none", "", "", "", ""])
            continue
        rows.append(
            [
                capacity.variant.name,
                f"{rate:.2f}",
                f"{rate * best.figures.attainment:.2f}",
                f"{best.figures.tokens_per_s:,.0f}",
                "" if first is None else f"{rate / first:.2f} x",
                _usd(best),
            ]
        )
    head = ["variant", "requests/s", "goodput/s", "tokens/s", "gain", "USD/M tokens"]
    return title, Grid(head=head, rows=rows)
