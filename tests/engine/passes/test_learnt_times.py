"""Decisions by learnt pass times beside those by true ones, on recorded times of two processors.

Every step chooses the length of a chain of guesses. Its pass takes what the machine takes then.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from outrider.engine.passes.step_times import RunningStepTimes, StepTimeCurve

# Seconds of a large model's pass, 400 M parameters in bfloat16 on one thread.
ROWS = (1, 2, 4, 8, 12, 16, 24)
AVX2 = (0.047, 0.047, 0.079, 0.152, 0.223, 0.294, 0.436)
AVX512 = (0.0094, 0.0096, 0.0098, 0.0109, 0.0109, 0.0136, 0.0195)
DEPTHS = np.arange(17)
DRAFTS_S = 0.002 * DEPTHS  # a small model's passes

# How many times as long a pass with so many rows takes.
Slowness = Callable[[int], float]


def quiet(num_rows: int) -> float:
    """Nothing disturbs."""
    return 1.0


def throttled(num_rows: int) -> float:
    """The processor's clock has halved."""
    return 2.0


def measured(seconds: tuple[float, ...], slowness: Slowness, *, is_quiet: bool) -> StepTimeCurve:
    """Return a curve as it is measured while passes are so slow."""
    slow = [each * slowness(rows) for rows, each in zip(ROWS, seconds, strict=True)]
    return StepTimeCurve.from_points(ROWS, slow, is_quiet=is_quiet)


class Machine:
    """One stream on a machine that begins with the times of some measurement."""

    def __init__(self, seconds: tuple[float, ...], believed: StepTimeCurve) -> None:
        self.seconds = seconds
        self.times = RunningStepTimes(believed)
        self.rng = np.random.default_rng(5)
        self.clock_s = 0.0

    def lost_share(self, num_steps: int, slowness: Slowness = quiet) -> float:
        """Run steps; return the share of tokens that decisions by true times would add."""
        true = measured(self.seconds, slowness, is_quiet=True)
        true_s = DRAFTS_S + np.array([true(depth + 1) for depth in DEPTHS])
        num_tokens = lost_tokens = 0.0
        for _ in range(num_steps):
            tokens = self._tokens()
            learnt_s = DRAFTS_S + self.times.compared(1, len(DEPTHS))
            depth = int((tokens / learnt_s).argmax())
            num_tokens += tokens[depth]
            lost_tokens += (tokens / true_s).max() * true_s[depth] - tokens[depth]
            self.clock_s += true_s[depth]
            noise = np.exp(self.rng.normal(0.0, 0.05))
            self.times.observe(depth + 1, true(depth + 1) * noise)
        return float(lost_tokens / num_tokens)

    def _tokens(self) -> npt.NDArray[np.float64]:
        """Return what the next step yields with chains of every length."""
        acceptance = np.clip(self.rng.beta(6.0, 2.2), 0.05, 0.97)
        return np.asarray((acceptance**DEPTHS).cumsum())


def by_processor(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on both."""
    return pytest.mark.parametrize("seconds", [AVX2, AVX512], ids=["avx2", "avx512"])(test)


@by_processor
def test_true_times_stay_true(seconds: tuple[float, ...]) -> None:
    machine = Machine(seconds, measured(seconds, quiet, is_quiet=True))
    assert machine.lost_share(600) < 0.01


@by_processor
@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize(
    "slowness",
    [throttled, lambda rows: 1.6 if rows > 1 else 1.0, lambda rows: 2.0 if 2 < rows < 9 else 1.0],
    ids=["all", "guesses", "some"],
)
def test_times_of_a_busy_minute_are_corrected_in_a_quiet_one(
    seconds: tuple[float, ...], slowness: Slowness, is_quiet: bool
) -> None:
    """What says that it is of a busy minute, at once."""
    machine = Machine(seconds, measured(seconds, slowness, is_quiet=is_quiet))
    machine.lost_share(50 if not is_quiet else 600)
    assert machine.lost_share(200) < 0.04


@by_processor
def test_a_measurement_that_was_not_quiet_rules_no_guess_out(seconds: tuple[float, ...]) -> None:
    """At twice their time no guess pays on one of them, and what is not tried is not corrected."""
    busy = measured(seconds, lambda rows: 2.0 if rows > 1 else 1.0, is_quiet=False)
    machine = Machine(seconds, busy)
    machine.lost_share(200)
    assert machine.lost_share(200) < 0.02


def test_a_size_that_is_not_used_is_doubted_up_to_a_bound() -> None:
    """Where sizes are compared; a size that was never used is doubted for longer."""
    times = RunningStepTimes(measured(AVX512, quiet, is_quiet=True))
    before_s, few_s = times(24), times(1)

    def doubted(num_passes: int) -> float:
        for _ in range(num_passes):
            times.observe(1, few_s)
        return float(times.compared(1, 24)[-1] / before_s)

    assert 0.7 < doubted(200) < 0.95
    assert 0.2 < doubted(5000) < 0.3
    times.observe(24, before_s)
    assert doubted(0) == pytest.approx(1.0)
    assert 0.85 < doubted(5000) < 0.95
    assert times(24) == pytest.approx(before_s)


def test_one_more_row_does_not_seem_to_take_less_than_those_that_every_pass_has() -> None:
    """Though no pass had so many for long; else one guess would seem to pay among many streams."""
    times = RunningStepTimes(measured(AVX2, quiet, is_quiet=True))
    times.observe(24, times(24))
    for _ in range(1000):
        times.observe(16, times(16))
    seconds = times.compared(16, 24)
    assert seconds[0] == pytest.approx(times(16))
    assert (np.diff(seconds) > 0.0).all()
    assert seconds[-1] < 0.95 * times(24)


@by_processor
def test_guesses_that_were_saved_three_times_too_slow_are_tried_in_the_end(
    seconds: tuple[float, ...],
) -> None:
    """No guess pays by what is believed, and nothing but time passes says that it is wrong."""
    machine = Machine(seconds, measured(seconds, lambda n: 3.0 if n > 1 else 1.0, is_quiet=True))
    machine.lost_share(800)
    assert machine.lost_share(400) < 0.02


@by_processor
def test_a_machine_that_throttles_is_followed_within_two_seconds(
    seconds: tuple[float, ...],
) -> None:
    machine = Machine(seconds, measured(seconds, quiet, is_quiet=True))
    machine.lost_share(100)
    begun_s = machine.clock_s
    while machine.clock_s < begun_s + 2.0:
        machine.lost_share(1, throttled)
    assert machine.lost_share(100, throttled) < 0.03
    machine.lost_share(20)  # and back
    assert machine.lost_share(100) < 0.03


@by_processor
def test_a_clock_that_jumps_changes_little(seconds: tuple[float, ...]) -> None:
    machine = Machine(seconds, measured(seconds, quiet, is_quiet=True))
    machine.lost_share(100)
    for rows in (1, 4):
        machine.times.observe(rows, 10.0)
        machine.times.observe(rows, 0.0)
    assert machine.lost_share(30) < 0.05
    assert machine.lost_share(100) < 0.02
