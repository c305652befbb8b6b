"""Rank 0's hold on the other ranks: their processes, from start to end, and the way to them."""

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from outrider.engine.errors import EngineError, RankLostError, UnsupportedModelError
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.shard import Shard
from outrider.engine.parallel.collectives import TorchCollectives
from outrider.engine.parallel.messages import (
    Loaded,
    MeasureRoom,
    ModelSource,
    OpenCache,
    RankCommand,
    RankFailed,
    RankSpec,
    Room,
)
from outrider.engine.passes.pass_memory import LargestPass

logger = logging.getLogger(__name__)

# Of a single exchange; the first ones may wait for a rank that compiles kernels.
_TIMEOUT_S: Final = 300.0
# How long an error waits for the watch to find that a rank's end was its cause.
_NOTICE_S: Final = 5.0
_STOP_S: Final = 5.0


class Ranks:
    """The ranks 1 to count - 1 of a model. Rank 0 is the process that made this.

    Started at once, so that they load their part while rank 0 loads its own with `shard`. Then
    `join` waits for them and meets them, and `open_cache` begins the work. `close` ends them; so
    does the end of this process, whichever way it ends. folder: where they meet.
    """

    def __init__(
        self,
        count: int,
        model: ModelSource,
        *,
        device: torch.device,
        num_threads: int = 1,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """`device`: "cuda" or "cpu"; rank r has GPU r. `num_threads`: of each rank, on a CPU."""
        self._count = count
        self._timeout_s = timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="outrider-ranks-"))
        self._reason: str | None = None
        self._has_ended = threading.Event()
        self._is_closing = False
        self.device = device if device.type == "cpu" else torch.device("cuda", 0)
        self._collectives = TorchCollectives(rank=0, count=count, device=self.device)
        self.shard = Shard(rank=0, count=count, collectives=self._collectives)
        self._others: list[_Other] = []
        try:
            for rank in range(1, count):
                spec = RankSpec(
                    rank=rank,
                    count=count,
                    device="cpu" if device.type == "cpu" else f"cuda:{rank}",
                    folder=str(self.folder),
                    num_threads=num_threads,
                    timeout_s=timeout_s,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    model=model,
                )
                self._others.append(_Other(spec, self._note_end))
        except BaseException:
            self.close()
            raise

    # ---- from the start to the first pass --------------------------------------------------

    def join(self, model: CausalModel) -> None:
        """Wait until the others have loaded their parts, and meet them. Raises EngineError.

        `model`: rank 0's.
        """
        for other in self._others:
            loaded = other.wait_loaded()
            if loaded is None:
                self._has_ended.wait(_NOTICE_S)
                self.check()
                raise RankLostError(f"rank {other.rank} of {self._count} did not load its part")
            if isinstance(loaded, RankFailed):
                kind = UnsupportedModelError if loaded.is_unsupported else EngineError
                raise kind(f"rank {other.rank} of {self._count}: {loaded.text}")
            if loaded.numerics != model.numerics:
                raise EngineError(
                    f"rank {other.rank} of {self._count} computes otherwise than rank 0: all "
                    "devices of a model have to be of one kind, with the same libraries."
                )
        with self.watched():
            self._collectives.connect(self.folder, timeout_s=self._timeout_s)

    def room(self, measure: Callable[[], int], largest: LargestPass) -> tuple[int, list[int]]:
        """Have all ranks run the largest pass, rank 0 by `measure`.

        Returns what that returns, and the free bytes of the other ranks' GPUs.
        """
        with self.watched():
            self._send(MeasureRoom(largest))
            measured = measure()
            rooms = [other.room() for other in self._others]
        return measured, [room for room in rooms if room is not None]

    def open_cache(self, cache: OpenCache) -> None:
        """Have the others allocate their cache, in place of one before."""
        with self.watched():
            self._send(cache)

    # ---- work ------------------------------------------------------------------------------

    def send(self, command: RankCommand) -> None:
        """Tell the others what to do next. Raises OSError for one that is gone."""
        self._send(command)

    def send_each(self, commands: Iterable[RankCommand]) -> None:
        """Tell each of the others something of its own, in their order; as `send`."""
        for other, command in zip(self._others, commands, strict=False):
            other.connection.send_bytes(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    def broadcast(self, values: Tensor) -> None:
        """Send a tensor of integers behind the command that announces it."""
        self._collectives.broadcast(values)

    def check(self) -> None:
        """Raise RankLostError if a rank is gone."""
        if self._reason is not None:
            raise RankLostError(self._reason)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise RankLostError in place of what a lost rank makes of an exchange."""
        self.check()
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._has_ended.wait(_NOTICE_S)
            if self._reason is None:
                raise
            raise RankLostError(self._reason) from error

    def _send(self, message: object) -> None:
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for other in self._others:
            other.connection.send_bytes(packed)

    # ---- the end ---------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The processes of the others."""
        return [other.process.pid for other in self._others]

    def _note_end(self, rank: int, why: str) -> None:
        """Note the first rank that ended unasked; called from its watch."""
        if self._is_closing or self._reason is not None:
            return
        self._reason = f"Rank {rank} of {self._count} of the model ended ({why})."
        logger.error("rank ended rank=%d of=%d why=%s", rank, self._count, why)
        self._has_ended.set()
        self._collectives.abort()

    def close(self) -> None:
        """End the others, and forget them. May be called again."""
        self._is_closing = True
        self._collectives.close()
        for other in self._others:
            other.stop()
        self._others = []
        shutil.rmtree(self.folder, ignore_errors=True)


class _Other:
    """One of the other ranks' processes, and the thread that waits for its end."""

    def __init__(self, spec: RankSpec, on_end: Callable[[int, str], None]) -> None:
        self.rank = spec.rank
        self._on_end = on_end
        self._is_loaded = False
        self.process, self.connection = _spawn()
        self._watch = threading.Thread(target=self._wait, name=f"rank-{spec.rank}", daemon=True)
        self._watch.start()
        with suppress(OSError):  # the watch will say why
            self.connection.send(spec)

    def wait_loaded(self) -> Loaded | RankFailed | None:
        """Wait for what the process says once it has loaded; None where it ended before."""
        try:
            said: Loaded | RankFailed = self.connection.recv()
        except (EOFError, OSError):
            return None
        self._is_loaded = isinstance(said, Loaded)
        return said

    def room(self) -> int | None:
        """Wait for the free bytes of its GPU. Raises OSError where it ended."""
        try:
            said: Room | RankFailed = self.connection.recv()
        except EOFError:
            raise OSError(f"rank {self.rank} ended") from None
        if isinstance(said, RankFailed):
            raise EngineError(f"rank {self.rank}: {said.text}")
        return said.free_bytes

    def _wait(self) -> None:
        status = self.process.wait()
        self._on_end(self.rank, self._describe(status))

    def _describe(self, status: int) -> str:
        with suppress(EOFError, OSError):  # before, `wait_loaded` reads what is said
            if self._is_loaded and self.connection.poll(0):
                return str(self.connection.recv().text)
        if status >= 0:
            return f"exit status {status}"
        hint = "; out of memory?" if -status == signal.SIGKILL else ""
        return f"signal {signal.Signals(-status).name}{hint}"

    def stop(self) -> None:
        """End the process, which ends when its standard input does."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        self._watch.join(_STOP_S)
        if self._watch.is_alive():
            self.process.kill()
            self._watch.join()
        self.connection.close()


def _spawn() -> tuple["subprocess.Popen[bytes]", Connection]:
    """A fresh interpreter; its standard input is open for as long as this process lives."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: the current folder is not a place to import from.
                [
                    sys.executable,
                    "-P",
                    "-c",
                    "from outrider.engine.parallel.rank_worker import main; main()",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError:
            ours.close()
            raise
    return process, Connection(ours.detach())
