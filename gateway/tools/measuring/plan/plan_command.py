"""`outrider plan`: what a device carries, before it is bought."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import (
    LargeRevision,
    ParallelOption,
    QuantizeOption,
    Small,
    SmallRevision,
    assigned,
)
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.gateway.tools.measuring.bench.results import BenchResult
    from outrider.gateway.tools.measuring.plan.capacity import Goal
    from outrider.gateway.tools.measuring.plan.report import CapacityPlan
    from outrider.gateway.tools.measuring.plan.workload import LengthPairs

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

PLAN_HELP: Final = """
Plan capacity: users, latency and cost, simulated from step times that are measured on this
machine, or from a GPU's data sheet.

[bold]Examples[/bold]

  outrider plan  [dim]# the bundled pair on this machine[/dim]

  outrider plan --device h100 --large Qwen/Qwen3-8B --small Qwen/Qwen3-0.6B \\
  --prompt-tokens 1000 --answer-tokens 250 --slo ttft_ms=500,inter_token_ms=30 --usd-per-hour 2.5

  outrider plan --trace azure.csv --small-share 0.6  [dim]# lengths from a trace[/dim]

  outrider bench --concurrency 8 --json run.json && outrider plan --check run.json

  outrider plan --window 4096  [dim]# what if no answer kept more KV than that[/dim]
"""
_MS: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The device, the models, and what they shall carry."""

    device: Annotated[
        str, typer.Option(help="here (measured), or a data sheet's: h100, a100-80gb, l4, …")
    ] = "here"
    large: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face id."), Sets("models.large")
    ] = None
    quantize: QuantizeOption = None
    small: Small = None
    large_revision: LargeRevision = None
    small_revision: SmallRevision = None
    tensor_parallel: ParallelOption = None
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of a prompt.")] = 300
    answer_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of an answer.")] = 120
    trace: Annotated[
        Path | None, typer.Option(help="Take lengths from a trace (Azure, Mooncake) instead.")
    ] = None
    slo: Annotated[str, typer.Option(help="ttft_ms=…,inter_token_ms=…")] = (
        "ttft_ms=1000,inter_token_ms=100"
    )
    target_attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet --slo.")
    ] = 0.9
    small_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of answers that the small model gives.")
    ] = 0.5
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.99, help="Acceptance rate of drafted tokens; default: measured."
        ),
    ] = None
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a device an hour, in USD.")
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Assume that an answer keeps at most this many tokens of KV."),
    ] = None
    check: Annotated[
        Path | None, typer.Option(help="Result of `outrider bench --json` to compare with.")
    ] = None
    overhead_ms: Annotated[
        float,
        typer.Option(min=0.0, help="With --check: time between client and engine, once a request."),
    ] = 3.0
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan as JSON; - for standard output.")
    ] = None
    html: Annotated[Path | None, typer.Option(help="Also write the plan as a page.")] = None
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.NAME=VALUE, any setting.")
    ] = None


@app.command("plan", help=PLAN_HELP)
@takes_flags
def plan(flags: PlanFlags) -> None:
    """Plan capacity."""
    from outrider.engine.errors import EngineError
    from outrider.gateway.tools.commands.terminal import make_console
    from outrider.gateway.tools.measuring.bench.results import ResultError
    from outrider.gateway.tools.measuring.bench.traces import WorkloadError
    from outrider.gateway.tools.reports.page import ReportError, write_page

    is_piped = str(flags.json_file) == "-"
    console = make_console(stderr=is_piped)
    with user_errors(
        usage=(SettingsError, WorkloadError, ResultError, EngineError, ValueError, ReportError)
    ):
        planned = _planned(flags, console)
        if flags.html is not None:
            # It imports torch, which takes seconds.
            from outrider.gateway.tools.measuring.plan.report import plan_page

            write_page(plan_page(planned), flags.html)
            console.print(f"written: {flags.html}")
    text = json.dumps(planned.document(), indent=2)
    if is_piped:
        typer.echo(text)
        return
    # It imports torch, which takes seconds.
    from outrider.gateway.tools.measuring.plan.report import print_plan

    print_plan(console, planned)
    if flags.json_file is not None:
        flags.json_file.write_text(text + "\n")
        console.print(f"written: {flags.json_file}")


def _planned(flags: PlanFlags, console: "Console") -> "CapacityPlan":
    """Measure or read the data sheet, then simulate. Raises SettingsError, ValueError, ..."""
    from outrider.gateway.settings.extras import need_extra
    from outrider.gateway.tools.commands.terminal import LoadingProgress
    from outrider.gateway.tools.measuring.bench.results import read_result
    from outrider.gateway.wiring.start import check_folders

    settings = load_settings(flags=assigned(flags.assignments) | setting_flags(flags))
    need_extra("engine", "Planning")
    check_folders(settings)
    measured = None if flags.check is None else read_result(flags.check)
    # It imports torch, which takes seconds.
    from outrider.gateway.tools.measuring.plan.compose import PlanWishes, compose, ground

    wanted = PlanWishes(
        lengths=_lengths(flags, measured),
        goal=_goal(flags.slo, flags.target_attainment),
        small_share=flags.small_share,
        usd_per_hour=flags.usd_per_hour,
        window=flags.window,
        measured=measured,
        overhead_s=flags.overhead_ms / _MS,
    )
    with LoadingProgress(console) as progress:
        found = ground(
            flags.device, settings, acceptance=flags.acceptance, on_progress=progress.report
        )
    return compose(found, wanted, settings)


def _goal(text: str, attainment: float) -> "Goal":
    """Objectives as they are written on the command line. Raises ValueError."""
    from outrider.gateway.tools.measuring.plan.capacity import Goal

    names = {"ttft_ms": "ttft_s", "inter_token_ms": "inter_token_s"}
    seconds: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise ValueError(f"--slo {part}: write ttft_ms=… or inter_token_ms=…")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = 0.0
        if not 0 < milliseconds < float("inf"):
            raise ValueError(f"--slo {part}: write a positive number of milliseconds")
        seconds[names[name]] = milliseconds / _MS
    return Goal(attainment=attainment, **seconds)


def _lengths(flags: PlanFlags, measured: "BenchResult | None") -> "LengthPairs":
    """Return the lengths of the trace, of the measured run, or of typical chats."""
    import numpy as np

    from outrider.gateway.tools.measuring.bench.traces import load_trace
    from outrider.gateway.tools.measuring.plan.check import lengths_of
    from outrider.gateway.tools.measuring.plan.workload import trace_lengths, usual_lengths

    if flags.trace is not None:
        return trace_lengths(load_trace(flags.trace))
    if measured is not None:
        return lengths_of(measured)
    return usual_lengths(flags.prompt_tokens, flags.answer_tokens, np.random.default_rng(0))
