"""A program in an interpreter of its own that answers JSON lines, seen from here."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.harness import without_engine_environment

_NONE: Final[Mapping[str, str]] = {}


class WorkerProcess:
    """Sends jobs and reads results. The first line that it reads is `versions`, of packages."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self._name = name
        self._process = process
        self.versions: dict[str, str] = self._receive()

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a job. Raises RuntimeError with the program's own words."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs {self._name} has died")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise RuntimeError(f"{self._name} failed: {result['error']}")
        return result


@contextlib.contextmanager
def worker_process(
    name: str,
    command: Sequence[str | Path],
    options: Mapping[str, Any],
    *,
    variables: Mapping[str, str] = _NONE,
) -> Iterator[WorkerProcess]:
    """Start `command` with the options as JSON behind it; it ends with the context."""
    with without_engine_environment():
        process = subprocess.Popen(
            [*map(str, command), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | dict(variables),
        )
    try:
        yield WorkerProcess(name, process)
    finally:
        process.kill()
        process.wait()
