"""Tokens a second of recent steps of one kind, by the clock."""

from dataclasses import dataclass
from typing import Final

# A step that took longer than so many usual ones had prompts beside it.
_LONGEST: Final = 3.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """Tokens and seconds of recent steps. kept: share that older steps keep with every new one."""

    kept: float
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 while nothing is known."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if self.steps > 1 and seconds > _LONGEST * self.seconds / self.steps:
            return
        self.tokens = self.kept * self.tokens + tokens
        self.seconds = self.kept * self.seconds + seconds
        self.steps = self.kept * self.steps + 1
