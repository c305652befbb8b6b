"""Shared by all benchmarks: timing in turn, figures, the machine's record, results on disk.

A figure without its conditions is a rumour: every result carries the commit, the machine, the
versions, the seed and the arguments. What is compared is run in turn (A B A B), so that a machine
that slows down slows both, and comparisons are ratios within a round.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.shared.record import RESULTS, ROOT, cpu_info, cpu_model, git, package_version, plain
from benchmarks.shared.record import Summary as Summary
from benchmarks.shared.record import paired_ratio as paired_ratio
from benchmarks.shared.record import percentile as percentile
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.engine import default_num_threads
from outrider.gateway.wiring.hardware import usable_physical_cores
from outrider.gateway.wiring.start import openmp_environment

CACHE = ROOT / "runs"
"""Where benchmarks keep what they make: ignored by git."""

DEMO_PAIR = ROOT / "draft" / "pair"

# A file or a pipe has no width of its own, and a table must not be squeezed into 80.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)

T = TypeVar("T")

# Instructions that decide what a matrix product costs.
_TELLING_FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
# Names the variables that `start` set.
_ADDED = "BENCHMARK_ADDED_ENVIRONMENT"
# More than this per core before the start, and somebody else is at work.
_IDLE_LOAD = 0.5
# Read by every thread in each pass, and far larger than any cache.
_BANDWIDTH_BYTES = 1 << 30
_BANDWIDTH_ROUNDS = 5


# ---- measuring --------------------------------------------------------------------------------


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it yields with a label after each unit of work."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    terminal = Console(stderr=True)
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bars:
        task = bars.add_task(description, total=total)

        def advance(label: str) -> None:
            bars.update(task, advance=1, description=f"{description}: {label}")

        yield advance


def measure_in_turn(
    cases: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warm_up: Mapping[str, Callable[[], object]] | None = None,
    description: str = "measuring",
) -> dict[str, list[T]]:
    """Warm every case up once, then run all of them round by round: A B A B.

    Returns what each case returned in each round. `warm_up`: shorter cases of the same names, for
    where a whole one would be a waste. Raises ValueError where only some cases have one: a
    comparison of a warm side with a cold one is a defect.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    first: Mapping[str, Callable[[], object]] = cases if warm_up is None else warm_up
    if first.keys() != cases.keys():
        raise ValueError(f"warmed up: {sorted(first)}, measured: {sorted(cases)}")
    results: dict[str, list[T]] = {name: [] for name in cases}
    with progress_bar(description, (1 + repeats) * len(cases)) as advance:
        for name, run in first.items():
            run()
            advance(f"warm-up, {name}")
        for _ in range(repeats):
            for name, case in cases.items():
                results[name].append(case())
                advance(name)
    return results


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def measure_bandwidth(*, device: str = "cpu", num_bytes: int = _BANDWIDTH_BYTES) -> float:
    """Bytes per second that torch reads from the device's memory, on a CPU with its threads.

    The best of several ways and rounds, so that a multiple of it flatters none of them.
    """
    words = torch.ones(num_bytes // 4, device=device)
    halves = words.view(torch.bfloat16)
    half_vector = torch.ones(4096, dtype=torch.bfloat16, device=device)
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        words.sum,
        words.max,
        lambda: torch.mv(words.view(-1, 4096), torch.ones(4096, device=device)),
        lambda: torch.mv(halves.view(-1, 4096), half_vector),
    )

    def read(way: Callable[[], torch.Tensor]) -> None:
        way().view(-1)[0].item()  # waits for the device

    with torch.inference_mode():
        fastest_s = min(timed(partial(read, way)) for _ in range(_BANDWIDTH_ROUNDS) for way in ways)
    return words.nbytes / fastest_s


# ---- the record -------------------------------------------------------------------------------


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what a figure depends on: commit, machine, threads, versions. Nothing personal."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "cpu": cpu_model(),
        "cpu_flags": _cpu_flags(),
        "cores": usable_physical_cores(),
        "torch_threads": torch.get_num_threads(),
        "openmp": {name: os.environ.get(name) for name in openmp_environment(Settings())},
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in _PACKAGES},
    }


def _cpu_flags() -> list[str]:
    flags = (cpu_info("flags") or cpu_info("Features") or "").split()
    return [flag for flag in _TELLING_FLAGS if flag in flags]


def write_results(
    script: str,
    variant: str,
    results: Mapping[str, Any],
    arguments: argparse.Namespace | Mapping[str, Any],
) -> Path:
    """Write <script>-<variant>.json to the argument `results`; returns the file's path."""
    given = arguments if isinstance(arguments, Mapping) else vars(arguments)
    record = {
        "script": script,
        "variant": variant,
        "environment": environment(str(given.get("device", "cpu"))),
        "arguments": {name: plain(value) for name, value in sorted(given.items())},
        "results": plain(results),
    }
    folder = Path(given["results"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{script}-{variant}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"[dim]written: {folder.name}/{path.name}[/dim]")
    return path


# ---- for people -------------------------------------------------------------------------------


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = ""
) -> None:
    """Print a table: the first column left, the others right."""
    table = Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def milliseconds(seconds: float) -> str:
    """Seconds as a figure in milliseconds, without the unit."""
    return f"{seconds * 1e3:.2f}"


def verdict(is_met: bool) -> str:
    """A goal's outcome, in colour."""
    return "[green]yes[/green]" if is_met else "[red]no[/red]"


# ---- the command line -------------------------------------------------------------------------


def argument_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; the docstring becomes the help."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", type=Path, default=DEMO_PAIR / "large", help="large model")
    parser.add_argument("--small", type=Path, default=DEMO_PAIR / "small", help="small model")
    parser.add_argument("--expand-target", help="grow the large model, for example to 400M")
    parser.add_argument("--expand-draft", help="grow the small model, for example to 40M")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch's threads; default: as in serving")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds")
    parser.add_argument("--variant", help="name of the results file's second part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    return parser


def start(main: Callable[[], None]) -> None:
    """Run a script's `main` in the environment that serving gives its engine.

    OpenMP reads it when torch is loaded, so where it is not set yet the program starts over.
    """
    missing = {
        name: value
        for name, value in openmp_environment(Settings()).items()
        if name not in os.environ
    }
    if missing:
        os.environ |= {**missing, _ADDED: " ".join(missing)}
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    main()


@contextmanager
def without_engine_environment() -> Iterator[None]:
    """For starting another program: the environment as it was before `start` added to it."""
    added = {name: os.environ[name] for name in os.environ.get(_ADDED, "").split()}
    for name in added:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ |= added


def prepare(arguments: argparse.Namespace) -> None:
    """Quiet the libraries, and see that the models are there; before anything is loaded."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet_transformers()
    arguments.load_before = load_before()
    for name in ("large", "small"):
        folder = getattr(arguments, name)
        if not (folder / "config.json").is_file():
            raise SystemExit(f"--{name} {folder}: there is no config.json.")


def load_before() -> float:
    """Return the machine's load, and warn where something else is at work."""
    load, num_cores = os.getloadavg()[0], usable_physical_cores()
    if load > _IDLE_LOAD * num_cores:
        console.print(
            f"[yellow]The machine is busy (load {load:.1f} on {num_cores} cores): "
            "figures will be noise.[/yellow]"
        )
    return load


def quiet_transformers() -> None:
    """No warnings and bars of transformers between ours."""
    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bar()  # type: ignore[no-untyped-call]


def choose_threads(arguments: argparse.Namespace, large_folder: Path) -> None:
    """Use as many threads as the arguments say or serving would use for a model of this size."""
    if arguments.threads is None:
        weight_bytes = sum(file.stat().st_size for file in large_folder.glob("*.safetensors"))
        if arguments.dtype == "float32":
            weight_bytes *= 2  # checkpoints are stored in 16 bits
        arguments.threads = default_num_threads(weight_bytes)
    torch.set_num_threads(arguments.threads)


def variant_name(arguments: argparse.Namespace, *more: str) -> str:
    """Return what tells one results file of a script from another."""
    if arguments.variant:
        return str(arguments.variant)
    large = Path(arguments.large)
    name = "demo" if large.resolve() == (DEMO_PAIR / "large").resolve() else large.name
    if getattr(arguments, "pair", "demo") != "demo":
        name = str(arguments.pair)
    sizes = [size for size in (arguments.expand_target,) if size]
    return "-".join([name, *sizes, *more, arguments.dtype])
