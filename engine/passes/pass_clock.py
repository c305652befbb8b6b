"""Times of passes, taken without holding up the device."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# Finished passes that were not collected yet; older ones are forgotten.
_MAX_FINISHED = 256


@dataclass(slots=True, kw_only=True)
class PassTime:
    """One pass that is over."""

    num_rows: int
    num_logit_rows: int
    """Rows that got logits; the others, of prompts, only filled the cache."""
    seconds: float
    mean_context: float
    """Tokens that a row saw on average."""


@dataclass(slots=True)
class PassTimes:
    """Times of a runner's forward passes, in seconds."""

    total_s: float = 0.0
    last_s: float = 0.0
    """On the CPU, of the pass that was just made. In CUDA, of the last pass that is known to be
    over: the passes of a step still run when the step's host work goes on."""
    num_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A pass on its way: an event in front of it and one behind it."""

    num_rows: int
    num_logit_rows: int
    mean_context: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(kw_only=True)
class PassClock:
    """Times passes: `start`, `start_work` and `stop`, in this order, for each.

    On the CPU a pass is over when `stop` is called. On other devices, events are recorded around
    the device's part. Later calls read them once they have happened, so the host never waits. The
    host's part runs beside the device's and is not counted.
    """

    device: torch.device
    listener: Callable[[int, float, float], None]
    """Called with the rows, the seconds and the rows' mean context of every pass that is over. On
    the CPU these seconds include the host's part, which nothing hides there."""
    make_event: Callable[[], torch.cuda.Event] = _timing_event
    times: PassTimes = field(init=False, default_factory=PassTimes)
    """Without the host's part."""
    _started_s: float = field(init=False, default=0.0)
    _work_started_s: float = field(init=False, default=0.0)
    _begin: torch.cuda.Event | None = field(init=False, default=None)
    _pending: deque[_Pending] = field(init=False, default_factory=deque)
    _spare: list[torch.cuda.Event] = field(init=False, default_factory=list)
    _finished: deque[PassTime] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no finished pass."""
        self._finished = deque(maxlen=_MAX_FINISHED)

    def start(self) -> None:
        """The host begins to prepare a pass."""
        self._started_s = time.perf_counter()

    def start_work(self) -> None:
        """Note that all is prepared and the device's part begins."""
        if self.device.type == "cpu":
            self._work_started_s = time.perf_counter()
            return
        self.poll()
        self._begin = self._event()
        self._begin.record()

    def stop(self, num_rows: int, num_logit_rows: int, mean_context: float) -> None:
        """The pass is over, or all of it is on its way."""
        self.times.num_passes += 1
        if self._begin is None:
            now_s = time.perf_counter()
            self._note(
                PassTime(
                    num_rows=num_rows,
                    num_logit_rows=num_logit_rows,
                    seconds=now_s - self._work_started_s,
                    mean_context=mean_context,
                )
            )
            self.listener(num_rows, now_s - self._started_s, mean_context)
            return
        end = self._event()
        end.record()
        self._pending.append(
            _Pending(
                num_rows=num_rows,
                num_logit_rows=num_logit_rows,
                mean_context=mean_context,
                begin=self._begin,
                end=end,
            )
        )
        self._begin = None

    def add(self, done: PassTime, whole_s: float) -> None:
        """Count a pass on the CPU that was timed elsewhere; `whole_s`: with the host's part."""
        self.times.num_passes += 1
        self._note(done)
        self.listener(done.num_rows, whole_s, done.mean_context)

    def poll(self) -> None:
        """Take note of the passes that have ended meanwhile; never waits."""
        while self._pending and self._pending[0].end.query():  # type: ignore[no-untyped-call]
            self._take(self._pending.popleft())

    def wait(self) -> float:
        """Wait until all passes are over; returns the seconds of the last one."""
        while self._pending:
            self._pending[0].end.synchronize()
            self._take(self._pending.popleft())
        return self.times.last_s

    def take_finished(self) -> list[PassTime]:
        """The passes that have ended since this was last asked, oldest first; never waits."""
        self.poll()
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _take(self, done: _Pending) -> None:
        seconds = done.begin.elapsed_time(done.end) / 1000  # of milliseconds
        self._spare += (done.begin, done.end)
        self._note(
            PassTime(
                num_rows=done.num_rows,
                num_logit_rows=done.num_logit_rows,
                seconds=seconds,
                mean_context=done.mean_context,
            )
        )
        self.listener(done.num_rows, seconds, done.mean_context)

    def _note(self, done: PassTime) -> None:
        self.times.last_s = done.seconds
        self.times.total_s += done.seconds
        self._finished.append(done)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else self.make_event()
