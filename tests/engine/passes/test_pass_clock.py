"""Times of passes on an asynchronous device, measured without waiting for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from outrider.engine.passes.pass_clock import PassClock, PassTime


@dataclass
class FakeDevice:
    """A device with a queue: `work(ms)` adds to it, time passes only by `run`."""

    queued_ms: float = 0.0
    now_ms: float = 0.0
    num_events: int = 0
    num_waits: int = 0

    def make_event(self) -> "FakeEvent":
        self.num_events += 1
        return FakeEvent(self)

    def run(self, ms: float) -> None:
        self.now_ms += ms


@dataclass
class FakeEvent:
    device: FakeDevice
    at_ms: float = field(default=-1.0)

    def record(self) -> None:
        self.at_ms = max(self.device.queued_ms, self.device.now_ms)

    def query(self) -> bool:
        return self.at_ms <= self.device.now_ms

    def synchronize(self) -> None:
        self.device.num_waits += 1
        self.device.now_ms = max(self.device.now_ms, self.at_ms)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def told() -> list[tuple[int, float, float]]:
    return []


@pytest.fixture
def clock(device: FakeDevice, told: list[tuple[int, float, float]]) -> PassClock:
    return PassClock(
        device=torch.device("cuda"),
        listener=lambda *seen: told.append(seen),
        make_event=device.make_event,  # type: ignore[arg-type]
    )


@pytest.fixture
def make_pass(clock: PassClock, device: FakeDevice) -> Callable[[int, float], None]:
    def make(num_rows: int, ms: float) -> None:
        clock.start()
        clock.start_work()
        device.queued_ms = max(device.queued_ms, device.now_ms) + ms
        clock.stop(num_rows, 1, 10.0 * num_rows)

    return make


def test_pass_times_are_reported_when_over_without_waiting(
    clock: PassClock,
    device: FakeDevice,
    told: list[tuple[int, float, float]],
    make_pass: Callable[[int, float], None],
) -> None:
    make_pass(1, 5.0)
    make_pass(2, 7.0)
    assert not told
    assert clock.times.num_passes == 2
    device.run(6.0)
    assert clock.take_finished() == [
        PassTime(num_rows=1, num_logit_rows=1, seconds=0.005, mean_context=10.0)
    ]
    assert told == [(1, 0.005, 10.0)]
    make_pass(3, 1.0)  # the second is still under way
    assert len(told) == 1
    device.run(50.0)
    make_pass(4, 1.0)
    assert told[1:] == [(2, pytest.approx(0.007), 20.0), (3, pytest.approx(0.001), 30.0)]
    assert clock.times.last_s == pytest.approx(0.001)
    assert clock.times.total_s == pytest.approx(0.013)
    assert device.num_waits == 0


def test_waiting_tells_all(
    clock: PassClock, device: FakeDevice, make_pass: Callable[[int, float], None]
) -> None:
    make_pass(1, 5.0)
    make_pass(2, 7.0)
    assert clock.wait() == pytest.approx(0.007)
    assert device.now_ms == 12.0
    assert [done.num_rows for done in clock.take_finished()] == [1, 2]
    assert clock.take_finished() == []


def test_events_are_used_again(
    clock: PassClock, device: FakeDevice, make_pass: Callable[[int, float], None]
) -> None:
    for number in range(20):
        make_pass(number, 1.0)
        device.run(10.0)
    assert device.num_events <= 4
    assert [done.seconds for done in clock.take_finished()] == pytest.approx([0.001] * 20)


def test_times_that_are_never_read_are_dropped(
    clock: PassClock, device: FakeDevice, make_pass: Callable[[int, float], None]
) -> None:
    for number in range(600):
        make_pass(number, 1.0)
        device.run(10.0)
    assert 0 < len(clock.take_finished()) < 600


def test_on_the_cpu_a_pass_is_over_at_once() -> None:
    told: list[tuple[int, float, float]] = []
    clock = PassClock(device=torch.device("cpu"), listener=lambda *seen: told.append(seen))
    clock.start()
    clock.start_work()
    clock.stop(3, 2, 8.0)
    [done] = clock.take_finished()
    assert (done.num_rows, done.mean_context) == (3, 8.0)
    [(num_rows, seconds, context)] = told
    assert (num_rows, context) == (3, 8.0)
    assert 0 < clock.times.last_s <= seconds  # the host's part counts for the listener
    assert clock.times.last_s == done.seconds
