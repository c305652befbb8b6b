"""Do steps with guesses pay in company? By the clock, not by a model of it.

Pass times say what a tree costs in passes. What it costs beside them (ranking, trees, verdicts)
grows with the sequences, and is all that is left of a tree where none pays. So among many
sequences, a few steps without guesses are run now and then, and whichever kind yields more tokens a
second is kept. What a request's text says never depends on it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final

from draft.pace import Pace
from engine.sequences.sequence import Sequence

# Below, guesses gain more than such probes could find out: measured on two cores, 1.4 times the
# tokens a second of plain steps at 4 sequences, 1.06 at 8 and .92 at 16.
_LEAST_SEQUENCES: Final = 12
# Steps of the other kind in a row, of which the first say nothing: the small model catches up.
_PROBE_STEPS: Final = 8
_UNMEASURED_STEPS: Final = 2
_FIRST_PROBE_AFTER: Final = 24
# Steps until the next probe where the better kind is at most so many times as fast.
_PROBE_AFTER: Final = ((1.15, 64), (1.5, 192), (float("inf"), 512))
_KEPT: Final = 0.95  # of older steps, with every new one


@dataclass(slots=True)
class _Company:
    """What is known of about so many sequences. Kinds of steps: True with guesses."""

    paces: dict[bool, Pace] = field(
        default_factory=lambda: {kind: Pace(kept=_KEPT) for kind in (True, False)}
    )
    until_probe: int = _FIRST_PROBE_AFTER
    probes_left: int = 0
    probed: bool = False
    kind: bool = True
    steps_of_kind: int = 0

    @property
    def better(self) -> bool:
        """The kind that has yielded more tokens a second."""
        return self.paces[True].rate >= self.paces[False].rate

    def next_kind(self) -> bool:
        """Choose the kind of the next step."""
        if self.probes_left:
            self.probes_left -= 1
            return self.probed
        self.until_probe -= 1
        if self.until_probe > 0:
            return self.better
        self.probes_left = _PROBE_STEPS - 1
        self.until_probe = self._probe_after()
        self.probed = not self.better
        return self.probed

    def _probe_after(self) -> int:
        rates = sorted(pace.rate for pace in self.paces.values())
        ratio = rates[1] / rates[0] if rates[0] else 1.0
        return next(steps for most, steps in _PROBE_AFTER if ratio <= most)


class StepPaces:
    """Chooses whether the next step has guesses. `clock`: seconds, as the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._companies: dict[int, _Company] = {}
        self._present: _Company | None = None
        self._ids: tuple[str, ...] = ()
        self._num_tokens = 0
        self._begin_s = 0.0

    def wants_guesses(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether a step of these sequences, which begins now, is to have guesses."""
        ids = tuple(sequence.request_id for sequence in sequences)
        num_tokens = sum(sequence.num_output_tokens for sequence in sequences)
        now_s = self._clock()
        if self._present is not None and ids == self._ids:
            self._note(self._present, num_tokens - self._num_tokens, now_s - self._begin_s)
        self._ids, self._num_tokens, self._begin_s = ids, num_tokens, now_s
        needs_guesses = any(sequence.cascade is not None for sequence in sequences)
        if len(sequences) < _LEAST_SEQUENCES or needs_guesses:
            self._present = None
            return True
        company = self._companies.setdefault(len(sequences).bit_length(), _Company())
        self._present = company
        kind = company.next_kind()
        company.steps_of_kind = company.steps_of_kind + 1 if kind is company.kind else 1
        company.kind = kind
        return kind

    def _note(self, company: _Company, num_tokens: int, seconds: float) -> None:
        if company.steps_of_kind > _UNMEASURED_STEPS and num_tokens > 0 and seconds > 0:
            company.paces[company.kind].add(num_tokens, seconds)
