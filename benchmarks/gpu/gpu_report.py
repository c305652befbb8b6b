"""A GPU benchmark's report: parts that fail or find no time do not hide the others.

Needs torch alone: a GPU machine may have none of the packages that serving needs.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.record import RESULTS, cpu_model, git, package_version, plain

_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure with what it should be: at least, or with `is_upper` at most."""

    name: str
    value: float
    goal: float
    is_upper: bool

    @property
    def is_met(self) -> bool:
        """Return whether it is as it should be."""
        return self.value <= self.goal if self.is_upper else self.value >= self.goal

    def __str__(self) -> str:
        """One line for people."""
        bound = "at most" if self.is_upper else "at least"
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict:6} {self.name}: {self.value:.3g}, {bound} {self.goal:.3g}"


@dataclass(kw_only=True)
class Report:
    """Sections of one benchmark: each is run if there is time left, and none hides another.

    The file is written after every section, so that a run that is stopped leaves what it has.
    """

    script: str
    arguments: argparse.Namespace
    device: torch.device
    results: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.arguments.budget_s) - (time.perf_counter() - self._started_s)

    def has_time(self, name: str, needed_s: float) -> bool:
        """Return whether a part that takes about `needed_s` fits; if not, note it as skipped."""
        if self.left_s >= needed_s:
            return True
        say(f"skipped: {name} (it wants {needed_s:.0f} s, {max(self.left_s, 0.0):.0f} s are left)")
        self.skipped.append(name)
        return False

    def section(self, name: str, work: Callable[[], Any], *, needed_s: float = 1.0) -> Any:
        """Run one part and keep what it returns; None where it was skipped or failed."""
        if not self.has_time(name, needed_s):
            return None
        started_s = time.perf_counter()
        found = self.part(name, work)
        if found is not None:
            self.results[name] = found
        say(f"[{name}: {time.perf_counter() - started_s:.1f} s]")
        self.write()
        return found

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run something; where it fails, note that and return None."""
        try:
            with torch.no_grad():
                return work()
        except Exception as error:  # noqa: BLE001 - reported, and the other parts go on
            first_line = str(error).partition("\n")[0]
            self.errors[name] = f"{type(error).__name__}: {first_line}"
            say(f"FAILED: {name}: {self.errors[name]}")
            traceback.print_exception(error)
            return None

    def goal(self, name: str, value: float, *, at_least: float = 0.0, at_most: float = 0.0) -> None:
        """Note a figure that has a goal; give one of the two bounds."""
        is_upper = at_most > 0.0
        bound = at_most if is_upper else at_least
        self.goals.append(Goal(name=name, value=value, goal=bound, is_upper=is_upper))

    def write(self) -> Path:
        """Write the file as it stands."""
        name = self.script + ("-dry" if self.arguments.dry else f"-{device_slug(self.device)}")
        record = {
            "script": self.script,
            "variant": name.removeprefix(f"{self.script}-"),
            "environment": gpu_environment(self.device),
            "arguments": {key: plain(value) for key, value in sorted(vars(self.arguments).items())},
            "results": plain(self.results),
            "goals": [{**plain(asdict(goal)), "is_met": goal.is_met} for goal in self.goals],
            "skipped": self.skipped,
            "errors": self.errors,
        }
        folder = Path(self.arguments.results)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def finish(self) -> int:
        """Print the goals and what is missing; the exit status, 1 where a part failed."""
        if not self.arguments.dry:  # an interpreter's times are no figures
            for goal in self.goals:
                say(str(goal))
        for name in self.skipped:
            say(f"not measured, no time: {name}")
        for name in self.errors:
            say(f"not measured, failed: {name}")
        say(f"written: {self.write().name}")
        return 1 if self.errors else 0


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """Return what a figure depends on. Nothing personal."""
    is_real = device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        # A copy of the working tree may have no history: whoever made it can say what it is.
        "commit": git("rev-parse", "--short=12", "HEAD") or os.environ.get("OUTRIDER_COMMIT"),
        "dirty": bool(git("status", "--porcelain")),
        "device": torch.cuda.get_device_name(device) if is_real else str(device),
        "cuda": torch.version.cuda,
        "cpu": cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in _PACKAGES},
    }


def device_slug(device: torch.device) -> str:
    """For file names: "h100", "h200"; "cpu"."""
    if device.type != "cuda":
        return device.type
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    chosen = [word for word in words if any(letter.isdigit() for letter in word)]
    return chosen[0] if chosen else "gpu"


# ---- for people and the command line ------------------------------------------------------------


def say(text: str) -> None:
    """One line, at once: a run that hangs shows where."""
    print(text, flush=True)


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table: the first column left, the others right."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    say(f"\n{title}")
    for row in cells:
        first, *others = row
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        say("  ".join([first.ljust(widths[0]), *padded]))


def microseconds(seconds: float) -> str:
    """Seconds as a figure in microseconds, without the unit."""
    return f"{seconds * 1e6:.1f}"


def gpu_parser(docstring: str | None, *, budget_s: float) -> argparse.ArgumentParser:
    """The options that every GPU benchmark has; the docstring becomes the help."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes; without a GPU interpreted")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="seconds for all parts")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds of a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    return parser


def start(main: Callable[[], int]) -> None:
    """Run a script's `main` and exit with its status.

    Without a GPU there is only `--dry`, with Triton's interpreter; that is chosen in the
    environment before kernels are imported, so the program starts over with it.
    """
    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        if "--dry" not in sys.argv:
            say("There is no GPU here: only --dry can be run.")
            sys.exit(2)
        if os.environ.get("TRITON_INTERPRET") != "1":
            os.environ |= {"TRITON_INTERPRET": "1", "OUTRIDER_KERNELS": "triton"}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """The GPU, or the CPU for a dry run without one; seeds torch."""
    torch.manual_seed(arguments.seed)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
