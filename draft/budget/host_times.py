"""The host's work, learnt from whole steps: the time that they take beside their passes.

A plain step says what every step takes: planning, verdicts, events. A step with guesses takes that,
and as much for its trees as for each of its levels of drafts: reading, ranking, choosing rows.
Where the host grows trees level by level, a level takes as long as a small pass of a fraction of a
millisecond; where the library runs all of them, next to nothing.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Final

# Of a new step: the half at first, for what was known of other numbers may be far off.
_FIRST_WEIGHT: Final = 0.5
_WEIGHT: Final = 0.1
# A running mean of values with a deviation of 1 has about this one.
_ERROR: Final = sqrt(_WEIGHT / (2.0 - _WEIGHT))
# A step that took longer than expected by more than this share of its passes was held up.
_MOST_SURPRISE: Final = 0.5


@dataclass(slots=True)
class _Mean:
    """A running mean of seconds, and of the square of how far they were from it."""

    seconds: float = 0.0
    square: float = 0.0
    weight: float = _FIRST_WEIGHT
    """The share that the next step has in the mean."""

    def add(self, surprise: float) -> None:
        """Learn from a step that took so many seconds more."""
        self.seconds += self.weight * surprise
        self.square += self.weight * (surprise * surprise - self.square)
        self.weight = max(self.weight / (1.0 + self.weight), _WEIGHT)


@dataclass(slots=True)
class RunningTimes:
    """Running means of seconds, by how many sequences decode together: 1, 2-3, 4-7 and so on.

    While a number is not known, the nearest one's count for it; those of more sequences as their
    share, for they hold what a large pass took more than was expected, too.
    """

    _means: dict[int, _Mean] = field(default_factory=dict)

    def __call__(self, num_sequences: int) -> float:
        """Return the seconds for so many; 0 while nothing is known."""
        return max(self._nearest(num_sequences).seconds, 0.0)

    def most(self, num_sequences: int) -> float:
        """Return what the mean is at most: a standard error more."""
        mean = self._nearest(num_sequences)
        return max(mean.seconds + _ERROR * sqrt(mean.square), 0.0)

    def _nearest(self, num_sequences: int) -> _Mean:
        size = num_sequences.bit_length()
        if (known := self._means.get(size)) is not None:
            return known
        nearest = min(self._means, key=lambda other: abs(other - size), default=None)
        if nearest is None:
            return _Mean()
        share, mean = 2.0 ** min(size - nearest, 0), self._means[nearest]
        return _Mean(share * mean.seconds, share * share * mean.square)

    def observe(self, num_sequences: int, seconds: float, *, bound_s: float) -> None:
        """Learn from one step. What differs by more than `bound_s` counts as so much."""
        mean = self._means[num_sequences.bit_length()] = self._nearest(num_sequences)
        mean.add(min(max(seconds - mean.seconds, -bound_s), bound_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step consists of, as far as its time depends on it."""

    num_sequences: int
    passes_s: float
    """Expected seconds of all its passes."""
    num_parts: int = 0
    """Its levels of drafts, and one for its trees; 0 for a plain step."""


@dataclass(slots=True)
class HostTimes:
    """Seconds of the host's work in steps."""

    plain: RunningTimes = field(default_factory=RunningTimes)
    """Of every step."""
    part: RunningTimes = field(default_factory=RunningTimes)
    """Of a level of drafts, or of the trees, besides."""
    _has_plain: bool = False

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a whole step that took so long.

        Before the first plain step, what any step takes counts as one more part.
        """
        bound_s = _MOST_SURPRISE * shape.passes_s
        number, num_parts, beside_s = shape.num_sequences, shape.num_parts, seconds - shape.passes_s
        self._has_plain = self._has_plain or not num_parts
        if not num_parts:
            self.plain.observe(number, beside_s, bound_s=bound_s)
            return
        if not self._has_plain:
            self.plain.observe(number, beside_s / (num_parts + 1), bound_s=bound_s)
        part_s = (beside_s - self.plain(number)) / num_parts
        self.part.observe(number, part_s, bound_s=bound_s / num_parts)
