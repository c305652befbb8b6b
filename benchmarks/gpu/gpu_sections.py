"""Parts of a run on a GPU, each a line of a JSONL file as soon as it is known.

Whatever ends the run loses one line at most. A part that fails is a line with its traceback, and
the others go on; an illegal address spoils the process, so it ends the run: what is measured behind
one is not true.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.gpu_report import say

_LOST = ("illegal", "unspecified launch failure", "misaligned")
_SHOWN = 400  # characters of a line on the terminal

Facts = Mapping[str, Any]


class ContextLostError(RuntimeError):
    """The device takes no more work of this process."""


class Sections:
    """The parts of one run: each runs if it is wanted and there is time for it.

    `only`: beginnings of the names that are wanted; none means all.
    """

    def __init__(self, file: Path, *, until_s: float, only: tuple[str, ...] = ()) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._until_s = until_s
        self._only = only
        self._started_s = time.monotonic()
        self.failed: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until this run is to be over."""
        return self._until_s - (time.monotonic() - self._started_s)

    def note(self, name: str, **facts: Any) -> None:
        """Write a line, to the disk at once."""
        at_s = round(time.monotonic() - self._started_s, 2)
        line = json.dumps({"at": at_s, "section": name, **facts}, default=str)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        say(line[:_SHOWN])

    def run(self, name: str, work: Callable[[], Facts], *, needs_s: float = 1.0) -> bool:
        """Run a part and note what it returns. True if it went well.

        Raises ContextLostError where no later part could be believed.
        """
        if self._only and not name.startswith(self._only):
            return False
        if self.left_s < needs_s:
            self.note(name, skipped=f"{self.left_s:.0f} s left, {needs_s:.0f} wanted")
            return False
        started_s = time.monotonic()
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - noted, and the other parts go on
            self._note_failure(name, error, time.monotonic() - started_s)
            return False
        self.note(name, ok=True, seconds=round(time.monotonic() - started_s, 2), **found)
        return True

    def end(self) -> int:
        """Note the end; the exit status, 1 where a part failed."""
        self.note("end", failed=self.failed)
        return 1 if self.failed else 0

    def _note_failure(self, name: str, error: Exception, seconds: float) -> None:
        self.failed.append(name)
        what = f"{type(error).__name__}: {error}"[:500]
        trace = "".join(traceback.format_exception(error))[-2000:]
        self.note(name, ok=False, seconds=round(seconds, 2), error=what, trace=trace)
        if any(word in what.lower() for word in _LOST):
            raise ContextLostError(what) from error
