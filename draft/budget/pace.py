"""Tokens and seconds of recent steps of one kind, by the clock."""

from dataclasses import dataclass
from typing import Final

# A step that took longer than so many usual ones was held up by something else. It counts as so
# long: without it, a busy machine would seem to hold up long steps alone.
_LONGEST: Final = 4.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """Tokens and seconds of recent steps. kept: share that older steps keep with every new one."""

    kept: float
    tokens: float = 0.0
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

    def add(self, tokens: float, seconds: float) -> None:
        """Learn from a step."""
        if self.steps >= 1:
            seconds = min(seconds, _LONGEST * self.step_s)
        self.fade(self.kept)
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1

    def fade(self, kept: float) -> None:
        """Let the steps so far count for less."""
        self.tokens *= kept
        self.seconds *= kept
        self.steps *= kept
