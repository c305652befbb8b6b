"""The time of a level of drafts beside its pass: reading logits, ranking, choosing the next rows.

A small model's pass takes a fraction of a millisecond on a CPU, and the host's work beside it as
long again. So it is part of what a level is expected to take.
"""

from dataclasses import dataclass, field
from typing import Final

_WEIGHT: Final = 0.1  # of a new level
_LONGEST: Final = 4.0  # a level that took longer than so many usual ones was held up
_KEPT: Final = 0.998  # by a step that asks for no level, and so measures none


@dataclass(slots=True)
class LevelHostTimes:
    """Running means of seconds, by how many trees grow together: 1, 2-3, 4-7 and so on."""

    _mean_s: dict[int, float] = field(default_factory=dict)

    def __call__(self, num_trees: int) -> float:
        """Return the seconds beside a pass for so many trees; 0 while nothing is known."""
        if not self._mean_s:
            return 0.0
        wanted = num_trees.bit_length()
        return self._mean_s[min(self._mean_s, key=lambda known: abs(known - wanted))]

    def observe(self, num_trees: int, seconds: float, *, expected_s: float) -> None:
        """Learn from one level; `seconds`: of all of it, less the `expected_s` of its pass.

        The first of its size, which may load kernels, is believed as far as its pass is long.
        """
        size, seconds = num_trees.bit_length(), max(seconds, 0.0)
        mean_s = self._mean_s.setdefault(size, min(seconds, expected_s))
        self._mean_s[size] += _WEIGHT * (min(seconds, _LONGEST * mean_s) - mean_s)

    def forget(self) -> None:
        """Doubt what is known, so that levels which were held up once are tried again."""
        self._mean_s = {size: _KEPT * mean_s for size, mean_s in self._mean_s.items()}
