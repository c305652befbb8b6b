"""Learns from verdicts: the worth of guesses, and how often a drafting model is right."""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import Final

from outrider.draft.budget.budget import AcceptanceEstimate
from outrider.draft.budget.calibration import EdgeCalibration, RequestCalibration
from outrider.draft.draft_state import DraftState
from outrider.draft.trees.guess_tree import JudgedGuess
from outrider.draft.trees.tree_batch import DraftTree, judged, teach
from outrider.engine.protocols import DraftModel
from outrider.engine.sequences.sequence import Sequence

_MAX_CALIBRATIONS: Final = 64


class Lessons:
    """Learns from every guess whose parent was accepted, whether the guess was verified or not.

    An adapter moves the large model away from the small one by its own measure. So each adapter has
    a calibration of its own where trees grow on the host.
    """

    def __init__(self, calibration: EdgeCalibration) -> None:
        self.calibration = calibration
        """Of the model without adapters, and of all trees on the device."""
        self.acceptance = AcceptanceEstimate()
        """Of all sequences: the value at which a new one begins."""
        self.head_acceptance = AcceptanceEstimate()
        """The same of a head's guesses."""
        self._of_adapters: OrderedDict[str, EdgeCalibration] = OrderedDict()

    def calibrate(self, sequence: Sequence) -> RequestCalibration:
        """Return the calibration for a sequence's adapter and way of sampling."""
        is_greedy = sequence.request.sampling.is_greedy
        return self._calibration_of(sequence).of_requests(is_greedy=is_greedy)

    def _calibration_of(self, sequence: Sequence) -> EdgeCalibration:
        """Return its adapter's; of too many, the one wanted least recently goes."""
        adapter = sequence.adapters.get("large")
        if adapter is None:
            return self.calibration
        found = self._of_adapters.get(adapter.digest)
        if found is None:
            found = self._of_adapters[adapter.digest] = EdgeCalibration()
        self._of_adapters.move_to_end(adapter.digest)
        if len(self._of_adapters) > _MAX_CALIBRATIONS:
            self._of_adapters.popitem(last=False)
        return found

    def acceptance_of(self, model: DraftModel) -> AcceptanceEstimate:
        """Return how often a model's best guess is right, of all sequences."""
        return self.head_acceptance if model == "head" else self.acceptance

    def learn_trees(
        self,
        states: SequenceOf[DraftState],
        trees: SequenceOf[DraftTree],
        texts: SequenceOf[list[int]],
    ) -> list[list[int]]:
        """Learn from what was emitted in the places of trees that grew on the host.

        Returns how far each emitted token's guess lies behind the root's slot, -1 where the
        drafting model did not compute one.
        """
        found = judged(trees, texts)
        for state, text, (best, _) in zip(states, texts, found, strict=True):
            if state.was_asked:
                self.learn_first(state, best, text)
        teach(trees, [self.calibrate(state.sequence) for state in states], texts)
        return [offsets for _, offsets in found]

    def learn_guess(self, guess: JudgedGuess, *, is_greedy: bool) -> None:
        """Learn from one guess of a tree that grew on the device."""
        self.calibration.observe(
            guess.confidence,
            guess.was_right,
            sources=guess.evidence,
            depth=guess.depth,
            is_greedy=is_greedy,
        )

    def learn_first(self, state: DraftState, best: int | None, emitted: list[int]) -> None:
        """Note whether the best guess behind the root was right of the model that drafted."""
        if not emitted:
            return
        was_right = best == emitted[0]
        state.acceptance_of(state.model).observe(was_right)
        self.acceptance_of(state.model).observe(was_right)
