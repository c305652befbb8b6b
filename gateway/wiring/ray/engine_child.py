"""An engine's process (`outrider engine`) as a child: started, asked after, drained."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

# Not the asked-for port 0, which a refusal names.
_ENDPOINT: Final = re.compile(r"tcp://[^\s'\"]+:[1-9]\d*")
_MOST_LINES: Final = 40
_KILL_AFTER_S: Final = 10.0


class EngineEndedError(RuntimeError):
    """The engine's process ended. The message has its last words."""


class EngineChild:
    """One engine process. Blocking; made and closed by its replica."""

    def __init__(self, flags: Sequence[str], *, host: str, key: bytes | None) -> None:
        """Start it on a free port of `host`; `flags`: the models and settings.

        `key`: a key file.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-engine-")
        command = [
            sys.executable,
            "-m",
            "outrider.gateway.cli",
            "engine",
            "--listen",
            f"tcp://{host}:0",
        ]
        self.key_file: Path | None = None
        if key is not None:
            self.key_file = Path(self._folder.name) / "fleet.key"
            self.key_file.touch(mode=0o600)
            self.key_file.write_bytes(key)
            command += ["--key", str(self.key_file)]
        # Its standard input ends when this process does, however that ends; then it ends too.
        self._process = subprocess.Popen(
            [*command, "--with-parent", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )
        self._last: deque[str] = deque(maxlen=_MOST_LINES)
        self._endpoint: str | None = None
        self._told = threading.Event()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        """Find the address in what it prints, and keep the last lines for whoever asks why."""
        with contextlib.suppress(ValueError):  # closed
            for line in output:
                self._last.append(line.rstrip())
                if self._endpoint is None and (found := _ENDPOINT.search(line)):
                    self._endpoint = found.group()
                    self._told.set()
        self._told.set()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> str:
        """Return the address when it serves. Raises EngineEndedError, TimeoutError."""
        if not self._told.wait(timeout_s):
            raise TimeoutError(f"the engine did not load within {timeout_s:g} s")
        self.check()
        assert self._endpoint is not None
        return self._endpoint

    def check(self) -> None:
        """Raise EngineEndedError if the process has ended."""
        status = self._process.poll()
        if status is not None or (self._told.is_set() and self._endpoint is None):
            words = "\n".join(self._last)
            raise EngineEndedError(f"the engine ended with status {status}:\n{words}")

    def stop(self, timeout_s: float) -> None:
        """End it: running answers have `timeout_s` to end. May be called again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s + _KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._folder.cleanup()
