"""Progress of a run: live in a terminal, else one line for each phase."""

import statistics
from collections import deque
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outrider.gateway.tools.measuring.bench.results import RequestRow

# Drawing costs the sender time: seldom.
_REFRESH_PER_S: Final = 2.0
_NUM_RECENT: Final = 200


class LiveProgress:
    """A `RunWatch` that shows. A context manager takes it away again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            refresh_per_second=_REFRESH_PER_S,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, state="")
        self._num_in_flight = 0
        self._num_done = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._recent_ms: deque[float] = deque(maxlen=_NUM_RECENT)

    def __enter__(self) -> Self:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take it away."""
        self._progress.stop()

    def phase(self, text: str, *, num_requests: int | None, duration_s: float | None) -> None:
        """Begin anew."""
        self._num_done = self._num_failed = self._num_tokens = 0
        self._recent_ms.clear()
        self._progress.reset(
            self._task, description=text, total=num_requests, state=self._state(), completed=0
        )
        if not self._console.is_terminal:
            extent = ""
            if num_requests is not None:
                extent = f": {num_requests} requests"
            elif duration_s is not None:
                extent = f": {duration_s:.0f} s"
            self._console.print(f"{text}{extent} ...")

    def in_flight(self, count: int) -> None:
        """Shown with the next row."""
        self._num_in_flight = count

    def row(self, row: RequestRow) -> None:
        """Count it."""
        self._num_done += 1
        self._num_failed += not row.is_success
        self._num_tokens += row.num_completion_tokens
        if row.ttft_ms is not None:
            self._recent_ms.append(row.ttft_ms)
        # The text is made where it can be seen only.
        if self._console.is_terminal:
            self._progress.update(self._task, completed=self._num_done, state=self._state())

    def _state(self) -> str:
        parts = [f"{self._num_done} done", f"{self._num_in_flight} in flight"]
        if self._num_failed:
            parts.append(f"[red]{self._num_failed} failed[/red]")
        if self._recent_ms:
            parts.append(f"TTFT p50 {statistics.median(self._recent_ms):.0f} ms")
        parts.append(f"{self._num_tokens} tokens")
        return ", ".join(parts)
