"""Learns by the clock how an answer's pace depends on how many are written at once."""

from typing import Final

# A step counts for so much less with each later one: about the last hundred matter.
_FORGOTTEN: Final = 0.99
# Fewer steps than this say nothing.
_MIN_STEPS: Final = 20.0
# Added to the variance of the numbers: steps that were all alike do not make a slope.
_LEAST_VARIANCE: Final = 0.25


class AnswerPace:
    """Seconds between two tokens of an answer as a line over the number of answers in a step.

    A weighted least-squares fit that forgets. Steps with prompts are left out: they say how much
    arrives, not how many may run.
    """

    def __init__(self) -> None:
        self._weight = self._number = self._pace = self._squares = self._products = 0.0

    def note(self, *, num_answers: int, num_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that wrote so many tokens for so many answers."""
        if num_answers < 1 or num_tokens < 1:
            return
        pace_s = elapsed_s * num_answers / num_tokens
        self._weight = _FORGOTTEN * self._weight + 1.0
        self._number = _FORGOTTEN * self._number + num_answers
        self._pace = _FORGOTTEN * self._pace + pace_s
        self._squares = _FORGOTTEN * self._squares + num_answers**2
        self._products = _FORGOTTEN * self._products + num_answers * pace_s

    def expected_s(self, num_answers: int) -> float:
        """Return what to expect with so many answers; 0 where too little is known."""
        if self._weight < _MIN_STEPS:
            return 0.0
        number, pace_s = self._number / self._weight, self._pace / self._weight
        variance = self._squares / self._weight - number**2 + _LEAST_VARIANCE
        slope = (self._products / self._weight - number * pace_s) / variance
        # More answers never make one faster, and one alone takes some time.
        slope = min(max(slope, 0.0), pace_s / max(number, 1.0))
        return max(pace_s + slope * (num_answers - number), 0.0)
