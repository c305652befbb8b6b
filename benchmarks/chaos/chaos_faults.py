"""The faults of `benchmarks.chaos.chaos`. Each begins, lasts for seconds, and is undone."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.chaos.upstream_faults import FAULTS
from benchmarks.shared.mock_upstream import MockScript, MockThread

_FAKETIME: Final = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)
_STATE_BYTES: Final = 64 << 20
_CHUNK: Final = bytes(1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that was, from `began_s` to `ended_s`, seconds since the run began."""

    name: str
    began_s: float
    ended_s: float


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """The targets of faults: the gateway's process, its folders, its upstream server, its clock.

    `state` is a small file system of its own, or None where none can be mounted; `clock` the file
    that its wall clock reads its offset from, None without libfaketime.
    """

    gateway_pid: int
    database: Path
    upstream: MockThread
    healthy: MockScript
    state: Path | None
    clock: Path | None
    stopping: threading.Event = field(default_factory=threading.Event)

    def engines(self) -> list[int]:
        """Return the gateway's child processes that run engines, or wait to."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (folder / "cmdline").read_bytes()
                if parent == self.gateway_pid and b"engine_process" in words:
                    found.append(int(folder.name))
        return found

    def faults(self) -> dict[str, Callable[[random.Random], None]]:
        """Return the faults that this machine can have, by name."""
        found: dict[str, Callable[[random.Random], None]] = {
            "engine killed": self._kill_engine,
            "engine stopped": self._stop_engine,
            "upstream failing": self._spoil_upstream,
            "database locked": self._lock_database,
        }
        if self.state is not None:
            found["disk full"] = self._fill_disk
        if self.clock is not None:
            found["clock jumped"] = self._jump_clock
        return found

    def _wait(self, seconds: float) -> None:
        self.stopping.wait(seconds)

    def _kill_engine(self, chance: random.Random) -> None:
        for pid in self.engines():
            if chance.random() < 0.8:  # else the one in reserve, or the one at work, lives
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._wait(1.0)

    def _stop_engine(self, chance: random.Random) -> None:
        stopped = self.engines()
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._wait(chance.uniform(1.0, 14.0))
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _spoil_upstream(self, chance: random.Random) -> None:
        fault = chance.choice(FAULTS)
        fault.strike(self.upstream, self.healthy)
        self._wait(chance.uniform(3.0, 12.0))
        self.upstream.script = self.healthy
        self.upstream.listen()

    def _lock_database(self, chance: random.Random) -> None:
        connection = sqlite3.connect(self.database, isolation_level=None, timeout=20.0)
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._wait(chance.uniform(2.0, 15.0))
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    def _fill_disk(self, chance: random.Random) -> None:
        assert self.state is not None
        filler = self.state / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                for _ in range(_STATE_BYTES // len(_CHUNK)):  # whatever disk it is by now
                    file.write(_CHUNK)
            self._wait(chance.uniform(2.0, 10.0))
        finally:
            filler.unlink(missing_ok=True)

    def _jump_clock(self, chance: random.Random) -> None:
        assert self.clock is not None
        self.clock.write_text(f"{chance.choice((-7200, -30, 45, 5000)):+d}s\n")
        self._wait(chance.uniform(2.0, 8.0))
        self.clock.write_text("+0\n")


@contextlib.contextmanager
def striking(
    surroundings: Surroundings, *, zero_s: float, every_s: float, seed: int
) -> Iterator[list[Struck]]:
    """Strike one fault after the other, about `every_s` apart, as long as the context lasts."""
    struck: list[Struck] = []
    failures: list[BaseException] = []

    def strike() -> None:
        chance = random.Random(seed)
        faults = surroundings.faults()
        order: list[str] = []
        try:
            while not surroundings.stopping.wait(chance.uniform(0.5, 1.5) * every_s):
                order = order or chance.sample(sorted(faults), len(faults))
                name = order.pop()
                began_s = time.monotonic() - zero_s
                faults[name](chance)
                ended_s = time.monotonic() - zero_s
                struck.append(Struck(name=name, began_s=began_s, ended_s=ended_s))
        except BaseException as error:  # noqa: BLE001 - it is raised where the context ends
            failures.append(error)

    thread = threading.Thread(target=strike, name="faults", daemon=True)
    thread.start()
    try:
        yield struck
    finally:
        surroundings.stopping.set()
        thread.join(60.0)
    if failures:
        raise failures[0]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system on a folder; None where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_STATE_BYTES}", "outrider-chaos", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def fake_clock(file: Path) -> dict[str, str] | None:
    """Return the environment in which a process's wall clock follows `file`; None without it."""
    library = next((each for each in _FAKETIME if Path(each).is_file()), None)
    if library is None:
        return None
    file.write_text("+0\n")
    return {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_RESET": "1",
    }
