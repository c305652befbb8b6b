"""Windows of requests: clients in a process of their own ask one server for some seconds."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from benchmarks.shared.harness import measure_in_turn
from benchmarks.shared.record import ROOT, Summary
from benchmarks.shared.upstream_servers import Server

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

US: Final = 1e-6
"""Seconds in what the clients count in."""
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Whole answers of one window; `seconds` is None where the rate was given."""

    latencies_s: list[float]
    num_failed: int
    busy_s: float
    seconds: float | None

    @classmethod
    def of(cls, seen: dict[str, Any]) -> "Window":
        """Read what the clients saw."""
        return cls(
            latencies_s=[us * US for us in seen["latencies"] if us is not None],
            num_failed=seen["num_failed"],
            busy_s=seen["busy_s"],
            seconds=seen.get("seconds"),
        )


def seen_by_clients(
    server: Server,
    options: Sequence[str],
    *,
    core: int | None,
    key: str | None = None,
    paused: Iterable[Server] = (),
) -> dict[str, Any]:
    """Return what clients of `server` saw, with these options of upstream_load.

    The paused servers get no processor time meanwhile. Raises SystemExit where the clients fail.
    """
    command = [sys.executable, "-m", "benchmarks.shared.upstream_load", "--port", str(server.port)]
    command += ["--server-pid", str(server.pid), *options]
    command += ["--key", key] if key else []
    command += [] if core is None else ["--core", str(core)]
    with contextlib.ExitStack() as stack:
        for other in paused:
            stack.enter_context(other.paused())
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=False, timeout=_TIMEOUT_S
        )
    if done.returncode:
        raise SystemExit(f"the clients failed:\n{done.stderr.decode()[-2000:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def windows_in_turn(
    names: Iterable[K],
    window: Callable[[K, float], T],
    *,
    seconds: float,
    repeats: int,
    warm_up_s: float,
    description: str,
) -> dict[K, list[T]]:
    """Measure windows of all names round by round, after a short one of each."""
    by_text = {name if isinstance(name, str) else str(name): name for name in names}
    rounds = measure_in_turn(
        {text: partial(window, name, seconds) for text, name in by_text.items()},
        repeats=repeats,
        warm_up={text: partial(window, name, warm_up_s) for text, name in by_text.items()},
        description=description,
    )
    return {name: rounds[text] for text, name in by_text.items()}


def whole_figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Figures of one server's windows; `busy_s` is its processor time a request."""
    latencies_s = [s for window in windows for s in window.latencies_s]
    found: dict[str, Any] = {
        "num_answers": len(latencies_s),
        "num_failed": sum(window.num_failed for window in windows),
        "latency_s": Summary.of(latencies_s),
        "busy_s": sum(window.busy_s for window in windows) / len(latencies_s),
    }
    rates = [len(w.latencies_s) / w.seconds for w in windows if w.seconds is not None]
    if rates:
        found["answers_per_s"] = Summary.of(rates)
    return found
