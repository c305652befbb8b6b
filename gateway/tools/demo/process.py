"""`outrider serve` as a process of its own, for the demos: without keys and without a ledger."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Final, Self

_STOP_TIMEOUT_S: Final = 20.0
_URL: Final = re.compile(r"ready on (http://\S+)")


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class GatewayProcess:
    """One gateway, from `start` to `stop`; it can be started again. A context manager stops it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: those of `outrider serve`; without a port it takes any free one."""
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def start(self) -> str:
        """Start it; returns its URL when it is ready. Started again, it has the same one.

        Raises DemoError.
        """
        assert self._process is None
        command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", str(self._port)]
        command += ["--set", "database_url=none"]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [*command, *self._arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
            self._process = process
            # Its output ends when it does. How long a start takes is the machine's business.
            assert process.stdout is not None
            url = _find_url(process.stdout)
            if url is None:
                self.kill()
                raise DemoError(f"the gateway did not start:\n{_tail(log)}")
        self._port = int(url.rpartition(":")[2])
        return url

    def stop(self) -> None:
        """End it as a service manager does: it finishes its answers. Nothing where it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it in the middle of whatever it does, as a crash or a power cut does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def _find_url(output: IO[str]) -> str | None:
    for line in output:
        if found := _URL.search(line):
            return found.group(1)
    return None


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-15:]).strip() or "it wrote nothing"
