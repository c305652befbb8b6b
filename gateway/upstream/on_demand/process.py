"""The process of a model on demand: a gateway of its own, with one model, on a loopback port."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

_MODULE: Final = "outrider.gateway.wiring.on_demand_process"
_MAX_REPORT_BYTES: Final = 1 << 20
_END_S: Final = 10.0


class LoadError(Exception):
    """The model could not be loaded. The message is for clients.

    detail: what operators see, which may name files.
    """

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail or message


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a process tells once its model is loaded, or cannot be."""

    url: str = ""
    """Where it serves."""
    failure: str = ""
    """Why it ends instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecipe:
    """What a model's process is started with, each time."""

    settings: str
    """Its settings as JSON."""
    key: str = field(repr=False)
    """The key that it wants with each request: other users of this machine reach its port too."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Added to this process's own variables; None takes one away."""


class ModelProcess:
    """A process that was started. It ends with us, however we end: its input is closed then."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, recipe: ProcessRecipe) -> "ModelProcess":
        """Start it and send it its settings. Raises LoadError where no process can be had."""
        ours = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        variables = {**ours, **recipe.environment}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={name: value for name, value in variables.items() if value is not None},
                limit=_MAX_REPORT_BYTES,
            )
        except OSError as error:
            raise LoadError(f"its process cannot be started: {error.strerror}") from error
        assert process.stdin is not None
        # Not drained: a task that is cancelled while it waits here would leave the process behind.
        line = json.dumps({"settings": recipe.settings, "key": recipe.key})
        process.stdin.write(line.encode() + b"\n")
        return cls(process)

    async def serving(self) -> str:
        """Return its address once the model is loaded. Raises LoadError."""
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            if not line:
                status = await self._process.wait()
                how = f"signal {-status}" if status < 0 else f"status {status}"
                raise LoadError(f"its process ended while it loaded ({how}); see the log")
            report = msgspec.json.decode(line, type=Report)
        except ValueError as error:  # msgspec.DecodeError is one, and a line without end
            raise LoadError(f"its process cannot be understood: {error}") from error
        if report.failure:
            message = "its checkpoint is not readable here; the operator's log says why"
            raise LoadError(message, detail=report.failure)
        return report.url

    async def wait(self) -> int:
        """Return its status once it has ended."""
        return await self._process.wait()

    async def end(self) -> None:
        """End it and return when its memory is free."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("a model's process does not end and is killed pid=%d", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
