"""Starting the engine's process, which can happen long before the gateway is there to talk to it.

Torch and the weights take the engine seconds to load, and the gateway's own imports take it
seconds too: side by side they take half as long.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from outrider.gateway.engines.backends.wire import WorkerSpec
from outrider.gateway.telemetry.logs import LogFormat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """The command, arguments and environment of an engine's process, for every start of it."""

    builder: str
    """`module:function`, which makes the engine in the new process from `arguments`."""
    arguments: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Added to this process's own variables; None takes one away."""
    log_level: str = "INFO"
    log_format: LogFormat = "text"
    importer: str | None = None
    """`module:function` that imports what the builder needs, for a process that waits in
    reserve."""

    def spec(self, scratch_dir: Path) -> WorkerSpec:
        """Return the process's parameters; its socket is in the scratch folder.

        The next process listens there too: its gateways find it after each death.
        """
        return WorkerSpec(
            builder=self.builder,
            arguments=self.arguments,
            endpoint=f"ipc://{scratch_dir / 'gateways'}",
            scratch_dir=str(scratch_dir),
            log_level=self.log_level,
            log_format=self.log_format,
        )


class EngineProcess:
    """A process that was started before its client. A context manager: ends it at the end."""

    def __init__(self, recipe: EngineRecipe) -> None:
        """Start it. Only where sockets can be files: os.name is "posix"."""
        self.scratch_dir = make_scratch_dir()
        self.spec = recipe.spec(self.scratch_dir)
        self.process = spawn(self.spec, recipe.environment)

    def __enter__(self) -> Self:
        """Return the process: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of it: a client that took it over has ended it in good order."""
        end(self.process)
        shutil.rmtree(self.scratch_dir, ignore_errors=True)


def make_scratch_dir() -> Path:
    """Make a private folder (mode 0700) for the sockets, with a path short enough for one."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    if len(str(folder)) > 80:  # a socket's address holds 104 bytes on macOS
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))
    return folder


def spawn(spec: WorkerSpec, environment: Mapping[str, str | None]) -> subprocess.Popen[bytes]:
    """Start the process and send it its parameters."""
    process = spawn_waiting(environment)
    send_spec(process, spec)
    return process


def spawn_waiting(
    environment: Mapping[str, str | None], importer: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that waits for `send_spec`; first it imports, given an `importer`."""
    # The same code as ours, wherever it was imported from.
    ours = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    variables = {**ours, **environment}
    return subprocess.Popen(
        # -P: the folder the user stands in is not a place to import from.
        [
            sys.executable,
            "-P",
            "-m",
            "outrider.gateway.engines.backends.engine_process",
            *filter(None, [importer]),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in variables.items() if value is not None},
    )


def send_spec(process: subprocess.Popen[bytes], spec: WorkerSpec) -> None:
    """Send a waiting process its parameters."""
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        logger.warning("engine process ended before it was told what to do")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and close its pipes."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
