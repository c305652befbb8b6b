"""Trees that grew on the device, as the host reads them afterwards."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.draft.budget.budget import Floats
from outrider.draft.trees.guess_tree import JudgedGuess
from outrider.kernels.trees.tree_state import (
    CONFIDENCE,
    DEPTH,
    EVIDENCE,
    MODEL_CONFIDENCE,
    NUM_CANDIDATES,
    NUM_FIELDS,
    NUM_NUMBERS,
    PARENT,
    PATH_PROB,
    SOURCES,
    TOKEN_ID,
    TreeState,
    number,
)
from outrider.verifier.token_tree import SOURCE_BIT

Whole = npt.NDArray[np.int32]


def pack_state(state: TreeState, num_candidates: int) -> Tensor:
    """Pack all that `GrownTrees` reads, int32 [any]; no tree has more than `num_candidates`."""
    known = state.candidates[:, :, :num_candidates]
    return torch.cat([state.numbers.reshape(-1), known.reshape(-1)])


class GrownTrees:
    """The candidates of several trees; `packed`: `pack_state` on the host.

    `model_bit`: the source that the model which drafted is.
    """

    def __init__(self, packed: Whole, num_trees: int, model_bit: int = SOURCE_BIT["model"]) -> None:
        self._model_bit = model_bit
        numbers, candidates = np.split(packed, [num_trees * number(NUM_NUMBERS)])
        self._counts = numbers.reshape(num_trees, -1)[:, number(NUM_CANDIDATES)].tolist()
        self._candidates = candidates.reshape(num_trees, number(NUM_FIELDS), -1)

    def guesses(self, tree: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Path probabilities and depths of a tree's guesses, [num_guesses]."""
        probs = self._real(tree, number(PATH_PROB))[1:]
        return probs.astype(np.float64), self._whole(tree, number(DEPTH))[1:].astype(np.int64)

    def first_guess(self, tree: int) -> int | None:
        """The token that the model thought likeliest behind the root; None: it named none."""
        is_named = (self._whole(tree, number(PARENT)) == 0) & (
            self._whole(tree, number(SOURCES)) & self._model_bit > 0
        )
        named = np.flatnonzero(is_named)
        if not len(named):
            return None
        best = named[np.argmax(self._real(tree, number(MODEL_CONFIDENCE))[named])]
        return int(self._whole(tree, number(TOKEN_ID))[best])

    def judged(self, tree: int, path: list[int], token_ids: list[int]) -> Iterator[JudgedGuess]:
        """Every guess behind the candidates of an accepted path.

        `path`: the root and the accepted candidates. `token_ids`: what stands behind each of them.
        """
        step_of = np.full(self._counts[tree], -1)
        step_of[path] = np.arange(len(path))
        parents = self._whole(tree, number(PARENT))
        steps = step_of[parents]
        steps[0] = -1  # the root has no parent
        judged = np.flatnonzero(steps >= 0)
        was_right = (
            self._whole(tree, number(TOKEN_ID))[judged] == np.array(token_ids)[steps[judged]]
        )
        for confidence, evidence, depth, is_right in zip(
            self._real(tree, number(CONFIDENCE))[judged].tolist(),
            self._whole(tree, number(EVIDENCE))[judged].tolist(),
            self._whole(tree, number(DEPTH))[judged].tolist(),
            was_right.tolist(),
            strict=True,
        ):
            yield JudgedGuess(
                confidence=confidence, evidence=evidence, depth=depth, was_right=is_right
            )

    def _whole(self, tree: int, field: int) -> Whole:
        """A field of a tree's candidates, int32 [num_candidates]."""
        return self._candidates[tree, field, : self._counts[tree]]

    def _real(self, tree: int, field: int) -> npt.NDArray[np.float32]:
        """Return a field that holds float32 bits."""
        return self._whole(tree, field).view(np.float32)
