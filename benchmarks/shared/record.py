"""Figures and the record of a machine: what a result is made of, with the standard library only.

Apart from the harness, because a GPU machine may have none of the packages that serving needs.
"""

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Median, tail and extent of a number of samples, all in the samples' unit."""

    median: float
    p99: float
    minimum: float
    maximum: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Summary":
        """Raises ValueError for no samples."""
        return cls(
            median=percentile(samples, 50.0),
            p99=percentile(samples, 99.0),
            minimum=min(samples),
            maximum=max(samples),
            num_samples=len(samples),
        )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples, so no percentile")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100.0
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Ratios round by round: both sides of each were measured next to each other in time."""
    return Summary.of(
        [above / below for above, below in zip(numerators, denominators, strict=True)]
    )


def plain(value: Any) -> Any:
    """The value as JSON types; floats to six digits, paths to their last part.

    A summary of one sample is written as that sample.
    """
    if isinstance(value, Summary) and value.num_samples == 1:
        return plain(value.median)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    match value:
        case Path():
            return value.name
        case bool() | int() | str() | None:
            return value
        case float():
            return float(f"{value:.6g}")
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case Sequence():
            return [plain(item) for item in value]
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a result")


def git(*arguments: str) -> str | None:
    """Return what git says, None where it is not there or says nothing."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def package_version(package: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The CPU's name as the system reports it."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return answer.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return platform.processor()
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(key: str) -> str | None:
    """The first value of this name in /proc/cpuinfo, None where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
