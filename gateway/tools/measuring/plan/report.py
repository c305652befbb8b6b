"""A plan for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.gateway.tools.commands.terminal import print_whole
from outrider.gateway.tools.measuring.plan.capacity import (
    Capacity,
    CapacityRow,
    Goal,
    MemoryUse,
    users_that_fit,
)
from outrider.gateway.tools.measuring.plan.check import Compared
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes
from outrider.gateway.tools.measuring.plan.workload import LengthPairs

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Everything that was planned. `notes` say what it rests on, and what it leaves out.

    num_kv_tokens: of each tier's KV cache, by tier, the large one first. memory: of each device,
    where they are known by a data sheet.
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
    compared: Sequence[Compared] = ()
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
    print_whole(console, _models(plan))
    if plan.memory:
        print_whole(console, _memory(plan.memory))
    console.print(
        f"{plan.kv_line()}. Requests of {plan.lengths.name}: prompt "
        f"{plan.lengths.mean_prompt:.0f}, answer {plan.lengths.mean_answer:.0f}."
    )
    if len(plan.num_kv_tokens) > 1:
        console.print(
            "[dim]engine.small_kv_ratio shares it: 1 where every large answer is drafted for "
            "however many there are, more for large answers below.[/dim]"
        )
    for capacity in plan.capacities:
        print_whole(console, _by_concurrency(capacity))
    print_whole(console, _side_by_side(plan))
    if plan.compared:
        print_whole(console, _comparison(plan.compared))
    for note in plan.notes:
        console.print(f"[dim]- {note}[/dim]", highlight=False)


def _models(plan: CapacityPlan) -> Table:
    how = "measured here" if plan.is_measured else "by its data sheet, not measured"
    table = Table(title=f"{plan.device} ({how})", title_justify="left", box=None)
    for name in ("model", "parameters", "weights GB", "KV bytes a token"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for shape in plan.shapes:
        table.add_row(
            shape.name,
            f"{shape.num_parameters / 1e6:,.1f} M",
            f"{shape.weight_bytes / _GB:.3f}",
            f"{shape.kv_bytes_per_token:,}",
        )
    return table


def _memory(uses: Sequence[MemoryUse]) -> Table:
    table = Table(title="memory of each device, GB", title_justify="left", box=None)
    for name in ("device", "weights", "KV cache", "largest pass", "free"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for use in uses:
        parts = (use.weight_bytes, use.kv_bytes, use.pass_bytes, use.free_bytes)
        table.add_row(use.device, *(f"{part / _GB:.2f}" for part in parts))
    return table


def _by_concurrency(capacity: Capacity) -> Table:
    table = Table(title=capacity.variant.name, title_justify="left", box=None)
    names = ("users", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95", "tokens/s", "attained")
    has_price = any(line.usd_per_million is not None for line in capacity.lines)
    for name in (*names, "USD/M tokens") if has_price else names:
        table.add_column(name, justify="right")
    for line in capacity.lines:
        found = line.figures
        cells = [
            str(line.num_users),
            *(f"{1e3 * s:.1f}" for s in (found.ttft_p50_s, found.ttft_p95_s)),
            *(f"{1e3 * s:.2f}" for s in (found.tpot_p50_s, found.tpot_p95_s)),
            f"{found.tokens_per_s:,.0f}",
            f"{found.attainment:.0%}",
        ]
        if has_price:
            cells.append("" if line.usd_per_million is None else f"{line.usd_per_million:.3f}")
        table.add_row(*cells)
    return table


def _side_by_side(plan: CapacityPlan) -> Table:
    goal = plan.goal
    wanted = [
        f"{name} <= {1e3 * seconds:g} ms"
        for name, seconds in (("TTFT", goal.ttft_s), ("TPOT", goal.inter_token_s))
        if seconds is not None
    ]
    title = f"highest rate at which {goal.attainment:.0%} attain {' and '.join(wanted) or 'it'}"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("variant", "requests/s", "goodput/s", "tokens/s", "gain", "USD/M tokens"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    first = next((c.best_rate_per_s for c in plan.capacities if c.best_rate_per_s), None)
    for capacity in plan.capacities:
        best, rate = capacity.best, capacity.best_rate_per_s
        if best is None or rate is None:
            table.add_row(capacity.variant.name, "none", "", "", "", "")
            continue
        usd = best.usd_per_million
        table.add_row(
            capacity.variant.name,
            f"{rate:.2f}",
            f"{rate * best.figures.attainment:.2f}",
            f"{best.figures.tokens_per_s:,.0f}",
            "" if first is None else f"{rate / first:.2f} x",
            "" if usd is None else f"{usd:.3f}",
        )
    return table


def _comparison(compared: Sequence[Compared]) -> Table:
    table = Table(title="beside the measured run", title_justify="left", box=None)
    for name in ("figure", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for one in compared:
        cells = (f"{one.predicted:.2f}", f"{one.measured:.2f}", f"{one.error:+.0%}")
        table.add_row(f"{one.name}, {one.unit}", *cells)
    return table
