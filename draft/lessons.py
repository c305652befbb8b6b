"""Learns from verdicts: the worth of guesses, and how often the small model is right."""

from draft.budget import AcceptanceEstimate
from draft.calibration import EdgeCalibration
from draft.draft_state import DraftState
from draft.growing_tree import Calibrate, GrowingTree
from draft.grown_trees import JudgedGuess
from engine.sequences.sequence import Sequence
from engine.trees.token_tree import SOURCE_BIT


class Lessons:
    """Learns from every guess whose parent was accepted, whether the guess was verified or not.

    acceptance: of all sequences, the value at which a new one begins.
    """

    def __init__(self, calibration: EdgeCalibration) -> None:
        self.calibration = calibration
        self.acceptance = AcceptanceEstimate()
        self._calibrated: dict[bool, Calibrate] = {
            is_greedy: calibration.of_requests(is_greedy=is_greedy) for is_greedy in (False, True)
        }

    def calibrate(self, sequence: Sequence) -> Calibrate:
        """Return the calibration for a sequence's way of sampling."""
        return self._calibrated[sequence.request.sampling.is_greedy]

    def learn_tree(self, state: DraftState, tree: GrowingTree, emitted: list[int]) -> None:
        """Learn from the verdict on a tree that grew on the host."""
        if state.was_asked:
            named = [
                tree.candidates[child]
                for child in tree.candidates[0].children.values()
                if tree.candidates[child].sources & SOURCE_BIT["model"]
            ]
            best = max(named, key=lambda guess: guess.model_confidence, default=None)
            self.learn_first(state, None if best is None else best.token_id, emitted)
        is_greedy = state.sequence.request.sampling.is_greedy
        for guess, was_right in tree.judged(emitted):
            self.calibration.observe(
                guess.confidence,
                was_right,
                sources=guess.evidence,
                depth=guess.depth,
                is_greedy=is_greedy,
            )

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
        """Note whether the small model's best guess behind the root was right."""
        if emitted:
            was_right = best == emitted[0]
            state.acceptance.observe(was_right)
            self.acceptance.observe(was_right)
