"""`outrider bench` as a command: its run, and what is printed and written."""

import asyncio
import contextlib
import gc
import importlib.util
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import typer
from rich.console import Console

from outrider.gateway.tools.commands.user_errors import complain, user_errors
from outrider.gateway.tools.demo.process import DemoError, GatewayProcess
from outrider.gateway.tools.measuring.bench.client import TargetError
from outrider.gateway.tools.measuring.bench.fields import FieldError
from outrider.gateway.tools.measuring.bench.flags import (
    OWN_GATEWAY_URL,
    parse_sides,
    plan_of,
    with_suffix,
)
from outrider.gateway.tools.measuring.bench.options import BenchFlags
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, PlanError
from outrider.gateway.tools.measuring.bench.printing import print_comparison, print_result
from outrider.gateway.tools.measuring.bench.progress import LiveProgress
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    ResultError,
    read_result,
    write_result,
)
from outrider.gateway.tools.measuring.bench.runner import run_bench
from outrider.gateway.tools.measuring.bench.traces import WorkloadError
from outrider.gateway.tools.reports.page import ReportError, write_page

_EXIT_TOO_SLOW: Final = 3
_EXIT_STOPPED: Final = 130

Outcome = TypeVar("Outcome")

# A thread that draws gives way to the sender so soon.
_SWITCH_INTERVAL_S: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Destinations of results. `fail_below`: attainment in [0, 1] below which the command fails."""

    json: Path | None
    html: Path | None
    fail_below: float | None


def run_command(flags: BenchFlags) -> None:
    """Do what the flags say. Raises typer.Exit with the status where that is not 0."""
    console = Console(highlight=False)
    outputs = _Outputs(json=flags.json_file, html=flags.html_file, fail_below=flags.fail_below)
    with _errors_as_messages():
        if flags.compare is not None:
            _compare(console, flags.compare, outputs)
            return
        plan = plan_of(flags)
        sides = None if flags.ab is None else parse_sides(flags.ab[0], flags.ab[1], plan)
        for checked in sides or (plan,):
            checked.check()
        with _gateway(flags.url, flags.serve, sides) as own_url:
            if sides is not None:
                _run_sides(console, _at(sides[0], own_url), _at(sides[1], own_url), outputs)
            else:
                _run(console, _at(plan, own_url), outputs)


@contextlib.contextmanager
def _gateway(
    url: str | None, serve: str, sides: tuple[BenchPlan, BenchPlan] | None
) -> Iterator[str | None]:
    """Start a gateway for the run; None where every target has a URL."""
    have_urls = sides is not None and all(side.target.url != OWN_GATEWAY_URL for side in sides)
    if url is not None or have_urls:
        if serve:
            raise PlanError("--serve is for a gateway of this run's own, without --url")
        yield None
        return
    arguments = ["--log-level", "WARNING", *shlex.split(serve)]
    with GatewayProcess(arguments) as process:
        yield process.start()


def _at(plan: BenchPlan, url: str | None) -> BenchPlan:
    """The plan, asking our own gateway where it names no other."""
    if url is None or plan.target.url != OWN_GATEWAY_URL:
        return plan
    return replace(plan, target=replace(plan.target, url=url))


def _run(console: Console, plan: BenchPlan, outputs: _Outputs) -> None:
    with LiveProgress(Console(stderr=True, highlight=False)) as progress:
        result = _measured(run_bench(plan, watch=progress))
    print_result(console, result)
    _write(console, result, outputs.json, outputs.html)
    _exit_by(result, outputs)


def _run_sides(console: Console, plan_a: BenchPlan, plan_b: BenchPlan, outputs: _Outputs) -> None:
    from outrider.gateway.tools.measuring.bench.compare import write_comparison
    from outrider.gateway.tools.measuring.bench.paired import run_paired
    from outrider.gateway.tools.measuring.bench.report_html import comparison_page

    with LiveProgress(Console(stderr=True, highlight=False)) as progress:
        first, second, comparison = _measured(run_paired(plan_a, plan_b, watch=progress))
    for result in (first, second):
        print_result(console, result)
    print_comparison(console, comparison)
    if outputs.json is not None:
        write_comparison(comparison, outputs.json)
        _write(console, first, with_suffix(outputs.json, "-a"), None)
        _write(console, second, with_suffix(outputs.json, "-b"), None)
    if outputs.html is not None:
        write_page(comparison_page(first, second, comparison), outputs.html)
        console.print(f"report: {outputs.html}")
    for result in (first, second):
        _exit_by(result, outputs)


def _compare(console: Console, files: tuple[Path, Path], outputs: _Outputs) -> None:
    from outrider.gateway.tools.measuring.bench.compare import compare_results, write_comparison
    from outrider.gateway.tools.measuring.bench.report_html import comparison_page

    first, second = (read_result(path) for path in files)
    comparison = compare_results(first, second)
    print_comparison(console, comparison)
    if outputs.json is not None:
        write_comparison(comparison, outputs.json)
    if outputs.html is not None:
        write_page(comparison_page(first, second, comparison), outputs.html)


def _write(
    console: Console, result: BenchResult, json_file: Path | None, html_file: Path | None
) -> None:
    if json_file is not None:
        write_result(result, json_file)
        console.print(f"result: {json_file}")
    if html_file is not None:
        from outrider.gateway.tools.measuring.bench.report_html import report_page

        write_page(report_page(result), html_file)
        console.print(f"report: {html_file}")


def _exit_by(result: BenchResult, outputs: _Outputs) -> None:
    summary = result.summary
    if summary.num_completed == 0:
        raise TargetError("no request got an answer: the figures are of failures only")
    attainment = summary.attainment
    if (
        outputs.fail_below is not None
        and attainment is not None
        and attainment.value < outputs.fail_below
    ):
        typer.secho(
            f"outrider: {attainment.value:.1%} met the objectives, fewer than "
            f"{outputs.fail_below:.1%}",
            fg=typer.colors.RED,
            err=True,
        )
        raise typer.Exit(_EXIT_TOO_SLOW)


def _measured(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run it so that nothing of this process is in the way of its clock."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What is alive now lives on: no collection has to look at it in mid-measurement.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(work)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which needs less of the processor, where there is one."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


@contextlib.contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Print errors that the user can fix, and exit."""
    try:
        with user_errors(
            usage=(PlanError, WorkloadError, FieldError, ResultError, ReportError),
            failed=(TargetError, DemoError),
        ):
            yield
    except KeyboardInterrupt:
        complain("stopped; no result was kept")
        raise typer.Exit(_EXIT_STOPPED) from None
