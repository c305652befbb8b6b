"""Which of two models drafts: the one with more tokens a second, by the clock.

Measured apart for kinds of requests (greedy or sampled, with a grammar or without, by the length of
the text), because heads and small models differ in what they are good at. The other one is tried
now and then, a few steps in a row: in the first of them it may have to catch up.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final

from draft.pace import Pace
from engine.protocols import DraftModel
from engine.sequences.sequence import Sequence

Kind = tuple[bool, bool, int]

_MODELS: Final[tuple[DraftModel, DraftModel]] = ("head", "small")
_TRY_STEPS: Final = 12
_UNMEASURED_STEPS: Final = 2
_TRY_AFTER: Final = 400  # steps
_KEPT: Final = 0.98  # of older steps, with every new one


@dataclass(slots=True)
class _Choice:
    """What is known of one kind of request. It begins with a try of each model."""

    paces: dict[DraftModel, Pace] = field(
        default_factory=lambda: {model: Pace(kept=_KEPT) for model in _MODELS}
    )
    num_steps: int = 0
    model: DraftModel = "head"
    num_of_model: int = 0  # steps in a row

    def next_model(self) -> DraftModel:
        """Choose for one step."""
        place = self.num_steps % _TRY_AFTER
        better, other = sorted(_MODELS, key=lambda model: -self.paces[model].rate)
        model = better
        if self.num_steps < 2 * _TRY_STEPS:
            model = _MODELS[place // _TRY_STEPS]
        elif self.num_steps >= _TRY_AFTER and place < _TRY_STEPS:
            model = other
        self.num_steps += 1
        self.num_of_model = self.num_of_model + 1 if model == self.model else 1
        self.model = model
        return model

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn what the last step came to."""
        if self.num_of_model > _UNMEASURED_STEPS and num_tokens > 0 and seconds > 0:
            self.paces[self.model].add(num_tokens, seconds)


class ModelChoice:
    """Chooses between a small model and a head, for all requests of a kind in a step alike.

    clock: seconds, as the engine's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices: dict[Kind, _Choice] = {}
        self._of_step: dict[Kind, DraftModel] = {}
        self._sequences: dict[str, tuple[Kind, int]] = {}  # their kinds and tokens at its begin
        self._begin_s = 0.0

    def begin_step(self, sequences: SequenceOf[Sequence]) -> None:
        """Learn from the last step, if these sequences were its own; a step of them begins now."""
        now_s = self._clock()
        if list(self._sequences) == [sequence.request_id for sequence in sequences]:
            self._learn(sequences, now_s - self._begin_s)
        self._begin_s, self._of_step = now_s, {}
        self._sequences = {
            sequence.request_id: (_kind(sequence), sequence.num_output_tokens)
            for sequence in sequences
        }

    def _learn(self, sequences: SequenceOf[Sequence], seconds: float) -> None:
        tokens: dict[Kind, int] = {}
        numbers: dict[Kind, int] = {}
        for sequence in sequences:
            kind, before = self._sequences[sequence.request_id]
            tokens[kind] = tokens.get(kind, 0) + sequence.num_output_tokens - before
            numbers[kind] = numbers.get(kind, 0) + 1
        for kind in self._of_step:
            share_s = seconds * numbers[kind] / len(sequences)
            self._choices[kind].note(tokens[kind], share_s)

    def choose(self, sequence: Sequence) -> DraftModel:
        """The model that drafts for a sequence in this step, where both can."""
        kind = self._sequences[sequence.request_id][0]
        if kind not in self._of_step:
            self._of_step[kind] = self._choices.setdefault(kind, _Choice()).next_model()
        return self._of_step[kind]


def _kind(sequence: Sequence) -> Kind:
    """Whether it is greedy, whether it has a grammar, and how long its text is: to 256, 1024, …"""
    is_greedy = sequence.request.sampling.is_greedy
    length = (max((len(sequence.token_ids) - 1).bit_length() - 8, 0) + 1) // 2
    return is_greedy, sequence.grammar is not None, length
