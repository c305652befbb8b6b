"""Tokens and seconds of recent steps of one kind, by the clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Final

# A step that took longer than so many usual ones was held up by something else. It counts as so
# long: without it, a busy machine would seem to hold up long steps alone.
_LONGEST: Final = 4.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """Tokens and seconds of recent steps. kept: share that older steps keep with every new one."""

    kept: float
    tokens: float = 0.0
    squares: float = 0.0
    """The sum of the squares of each step's tokens."""
    seconds: float = 0.0
    steps: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def step_tokens(self) -> float:
        """Tokens of a step."""
        return self.tokens / self.steps

    @property
    def least_step_tokens(self) -> float:
        """Tokens of a step at least: a standard error below their mean."""
        mean = self.step_tokens
        variance = max(self.squares / self.steps - mean * mean, 0.0)
        return max(mean - sqrt(variance / self.steps), mean / 2)

    def add(self, tokens: float, seconds: float) -> None:
        """Learn from a step."""
        if self.steps >= 1:
            seconds = min(seconds, _LONGEST * self.step_s)
        self.fade(self.kept)
        self.tokens += tokens
        self.squares += tokens * tokens
        self.seconds += seconds
        self.steps += 1

    def join(self, other: "Pace") -> None:
        """Count the steps of another one as well."""
        self.tokens += other.tokens
        self.squares += other.squares
        self.seconds += other.seconds
        self.steps += other.steps

    def learnt(self) -> list[float]:
        """Return what was learnt, for `recall`."""
        return [self.tokens, self.squares, self.seconds, self.steps]

    def recall(self, learnt: Sequence[float], most_steps: float) -> None:
        """Count what was learnt before, as so many steps at most.

        Raises ValueError or TypeError for what no steps can have given.
        """
        tokens, squares, seconds, steps = map(float, learnt)
        if not all(map(isfinite, (tokens, squares, seconds, steps))) or min(tokens, squares) < 0:
            raise ValueError("pace")
        if steps < 0 or (seconds <= 0 < steps):
            raise ValueError("pace")
        share = min(1.0, most_steps / steps) if steps else 0.0
        self.tokens, self.squares = share * tokens, share * squares
        self.seconds, self.steps = share * seconds, share * steps

    def fade(self, kept: float) -> None:
        """Let the steps so far count for less."""
        self.tokens *= kept
        self.squares *= kept
        self.seconds *= kept
        self.steps *= kept
