"""The engine's end of a compiling process: start it, ask it, end it when it takes too long."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.request import GrammarSpec

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 60.0
_KILLED: Final = -signal.SIGKILL
_LENIENT: Final = '"lenient": true'  # as json.dumps writes it
_NOT_STARTED: Final = "the grammar compiler did not start; try again later"
# What an interpreter needs to find its libraries and folders. The rest may hold secrets, and the
# process reads what clients wrote.
_PASSED_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "PYTHONHOME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBounds:
    """Limits on compiling one grammar."""

    compile_cpu_s: float = 5.0
    """Processor time."""
    compile_wall_s: float = 20.0
    """Then the process is given up, however little of the machine it had."""
    compile_memory_bytes: int = 1024 * 2**20
    """Above what the idle process has."""
    token_cpu_s: float = 0.05
    """To find the tokens that may follow, at some of the places that a trial reaches."""
    max_grammar_bytes: int = 64 * 2**20
    """The largest compiled grammar."""


DEFAULT_BOUNDS: Final = CompileBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedGrammar:
    """A grammar that was compiled once within the bounds."""

    source: str
    """As llguidance takes it."""
    size_bytes: int
    """Bytes that the process grew by while it was compiled and followed for some tokens."""
    left_out: tuple[str, ...] = ()
    """Keywords of lenient schemas that it leaves out, as `place#pointer`."""


class UnfinishedGrammarError(InvalidGrammarError):
    """Compiling did not end in time, for reasons that may not be the grammar's."""


class _EndedError(InvalidGrammarError):
    """Compiling has ended the process."""


class GrammarProcess:
    """One compiling process, started at its first use and after each time that it was ended.

    `prepare` and `start` belong to one thread; `close` may be called from any.
    """

    def __init__(
        self, vocabulary: Sequence[bytes], stop_token_ids: Sequence[int], bounds: CompileBounds
    ) -> None:
        self._bounds = bounds
        hello = {
            "vocabulary": [text.decode("latin-1") for text in vocabulary],
            "stop_token_ids": list(stop_token_ids),
            "compile_cpu_s": bounds.compile_cpu_s,
            "token_cpu_s": bounds.token_cpu_s,
            "compile_memory_bytes": bounds.compile_memory_bytes,
            "max_grammar_bytes": bounds.max_grammar_bytes,
        }
        self._hello = json.dumps(hello).encode()
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._is_closed = False

    def start(self) -> Connection:
        """Start the process unless it runs, and wait until it takes grammars.

        Raises UnfinishedGrammarError where it does not come up.
        """
        if self._running is not None:
            return self._running[1]
        with self._lock:
            if self._is_closed:
                raise UnfinishedGrammarError("the engine is stopping")
            try:
                process, connection = self._running = _spawn()
            except OSError as error:  # no memory, descriptors or processes left, for now
                logger.error("compiling process did not start error=%s", error)
                raise UnfinishedGrammarError(_NOT_STARTED) from error
        try:
            connection.send_bytes(self._hello)
            if connection.poll(_START_TIMEOUT_S):
                connection.recv_bytes()
                return connection
        except (EOFError, OSError):
            pass
        exit_code = self._end()
        logger.error("compiling process did not start exit_code=%s pid=%s", exit_code, process.pid)
        raise UnfinishedGrammarError(_NOT_STARTED)

    def prepare(self, spec: GrammarSpec) -> TriedGrammar:
        """Compile a grammar once within the bounds, and follow it for some tokens.

        Raises InvalidGrammarError for any other, and UnfinishedGrammarError where that is not
        the grammar's own fault.
        """
        try:
            return self._prepare(spec, is_loose=False)
        except _EndedError:
            if spec.kind != "parts" or _LENIENT not in spec.text:
                raise
        return self._prepare(spec, is_loose=True)

    def _prepare(self, spec: GrammarSpec, *, is_loose: bool) -> TriedGrammar:
        connection = self.start()
        asked = {"kind": spec.kind, "text": spec.text, "is_loose": is_loose}
        try:
            connection.send_bytes(json.dumps(asked).encode())
            if connection.poll(self._bounds.compile_wall_s):
                return _read(connection.recv_bytes(), spec)
        except (EOFError, OSError):
            pass
        exit_code = self._end()
        logger.warning("compiling process was ended kind=%s exit_code=%s", spec.kind, exit_code)
        raise self._error(exit_code)

    def _error(self, exit_code: int) -> InvalidGrammarError:
        if exit_code == -signal.SIGPROF:
            return _EndedError(
                f"compiling the grammar takes more than {self._bounds.compile_cpu_s:g} s of "
                "processor time; simplify it"
            )
        if exit_code == _KILLED:  # by us, or by a system without memory
            return UnfinishedGrammarError(
                f"compiling the grammar took more than {self._bounds.compile_wall_s:g} s; simplify "
                "it or try again later"
            )
        return _EndedError("it cannot be compiled: the compiler failed on it; simplify it")

    def _end(self) -> int:
        """Kill the process unless it has ended; returns how it ended."""
        with self._lock:
            running, self._running = self._running, None
        if running is None:  # closed meanwhile
            return _KILLED
        process, connection = running
        connection.close()
        try:  # it may be ending by itself: its own exit code says more
            return process.wait(0.05)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """End the process for good; `prepare` in another thread raises then."""
        with self._lock:
            self._is_closed = True
            if self._running is None:
                return
            process, _ = self._running
            process.kill()
            process.wait()


def _spawn() -> tuple[subprocess.Popen[bytes], Connection]:
    """A fresh interpreter, not a fork: this process has threads and may have a GPU."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: the current folder is not a place to import from.
                [
                    sys.executable,
                    "-P",
                    "-c",
                    "from outrider.engine.grammar.grammar_worker import main; main()",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError:
            ours.close()
            raise
    return process, Connection(ours.detach())


def _environment() -> dict[str, str]:
    """Return variables that give the same code as ours, wherever imported from, and no secrets."""
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return passed | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _read(message: bytes, spec: GrammarSpec) -> TriedGrammar:
    answer = json.loads(message)
    if "unforeseen" in answer:
        logger.warning("grammar cannot be read kind=%s error=%s", spec.kind, answer["unforeseen"])
    if "error" in answer:
        raise InvalidGrammarError(answer["error"])
    return TriedGrammar(
        source=answer["source"], size_bytes=answer["size_bytes"], left_out=tuple(answer["left_out"])
    )
