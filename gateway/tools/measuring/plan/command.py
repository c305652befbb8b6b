"""`outrider plan`: what a device carries, before it is bought."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.command import (
    LargeRevision,
    ParallelOption,
    QuantizeOption,
    SmallRevision,
    assigned,
)
from outrider.gateway.tools.commands.user_errors import EXIT_USAGE, complain

if TYPE_CHECKING:
    from outrider.gateway.tools.measuring.bench.results import BenchResult
    from outrider.gateway.tools.measuring.plan.capacity import Goal
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


@app.command("plan", help=PLAN_HELP)
def plan(  # noqa: PLR0913 - a flag each
    device: Annotated[
        str, typer.Option(help="here (measured), or a data sheet's: h100, a100-80gb, l4, …")
    ] = "here",
    large: Annotated[str | None, typer.Option(help="Folder or Hugging Face id.")] = None,
    quantize: QuantizeOption = None,
    small: Annotated[str | None, typer.Option(help="The same for the small model.")] = None,
    large_revision: LargeRevision = None,
    small_revision: SmallRevision = None,
    tensor_parallel: ParallelOption = None,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of a prompt.")] = 300,
    answer_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of an answer.")] = 120,
    trace: Annotated[
        Path | None, typer.Option(help="Take lengths from a trace (Azure, Mooncake) instead.")
    ] = None,
    slo: Annotated[
        str, typer.Option(help="ttft_ms=…,inter_token_ms=…")
    ] = "ttft_ms=1000,inter_token_ms=100",
    target_attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet --slo.")
    ] = 0.9,
    small_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of answers that the small model gives.")
    ] = 0.5,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.99, help="Acceptance rate of drafted tokens; default: measured."
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a device an hour, in USD.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Assume that an answer keeps at most this many tokens of KV."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Result of `outrider bench --json` to compare with.")
    ] = None,
    overhead_ms: Annotated[
        float,
        typer.Option(min=0.0, help="With --check: time between client and engine, once a request."),
    ] = 3.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan as JSON; - for standard output.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="SECTION.NAME=VALUE, any setting.")
    ] = None,
) -> None:
    """Plan capacity."""
    from outrider.engine.errors import EngineError
    from outrider.gateway.settings.extras import need_extra
    from outrider.gateway.tools.commands.terminal import LoadingProgress, make_console
    from outrider.gateway.tools.measuring.bench.results import ResultError, read_result
    from outrider.gateway.tools.measuring.bench.traces import WorkloadError
    from outrider.gateway.wiring.start import check_folders

    console = make_console(stderr=json_file is not None and str(json_file) == "-")
    flags = {
        "models.large": large,
        "models.small": small,
        "models.large_revision": large_revision,
        "models.small_revision": small_revision,
        "models.quantize": quantize,
        "engine.tensor_parallel": tensor_parallel,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = load_settings(flags=assigned(assignments or []) | given)
        need_extra("engine", "Planning")
        check_folders(settings)
        measured = None if check is None else read_result(check)
        # These import torch, which takes seconds.
        from outrider.gateway.tools.measuring.plan.compose import Wanted, compose, ground
        from outrider.gateway.tools.measuring.plan.report import print_plan

        wanted = Wanted(
            lengths=_lengths(trace, (prompt_tokens, answer_tokens), measured),
            goal=_goal(slo, target_attainment),
            small_share=small_share,
            usd_per_hour=usd_per_hour,
            window=window,
            measured=measured,
            overhead_s=overhead_ms / _MS,
        )
        with LoadingProgress(console) as progress:
            found = ground(device, settings, acceptance=acceptance, on_progress=progress.report)
        planned = compose(found, wanted, settings)
    except (SettingsError, WorkloadError, ResultError, EngineError, ValueError) as error:
        complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    text = json.dumps(planned.document(), indent=2)
    if json_file is not None and str(json_file) == "-":
        typer.echo(text)
        return
    print_plan(console, planned)
    if json_file is not None:
        json_file.write_text(text + "\n")
        console.print(f"written: {json_file}")


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


def _lengths(
    trace: Path | None, means: tuple[float, float], measured: "BenchResult | None"
) -> "LengthPairs":
    """Return the lengths of the trace, of the measured run, or of typical chats."""
    import numpy as np

    from outrider.gateway.tools.measuring.bench.traces import load_trace
    from outrider.gateway.tools.measuring.plan.check import lengths_of
    from outrider.gateway.tools.measuring.plan.workload import trace_lengths, usual_lengths

    if trace is not None:
        return trace_lengths(load_trace(trace))
    if measured is not None:
        return lengths_of(measured)
    return usual_lengths(*means, np.random.default_rng(0))
