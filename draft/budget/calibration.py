"""Learns, while serving, the chance that a guess is accepted from its source's confidence.

A guess is judged only when the target reaches its parent, so every verdict gives one outcome for
each child along the accepted path. Confidences are cut into bins; each bin counts its outcomes with
decay and begins at the confidence itself; a running isotonic fit (pool adjacent violators: Ayer et
al., 1955; as a calibration: Zadrozny, Elkan, 2002) keeps the result in the confidences' order.
"""

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.kernels.cpu.tree_library import CalibrationTable
from outrider.verifier.params import SOURCES

# Beside the sources' bits, in a guess's evidence: the small model was asked at this position and
# did not name the token. It is the highest bit of evidence: tables have a half with it.
MODEL_SILENT: Final = 1 << len(SOURCES)

BIN_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_NUM_BINS: Final = len(BIN_EDGES) + 1
_MAX_DEPTH: Final = 64
# Depths 1, 2, 3-4, 5-8, 9-16 and deeper behave alike within themselves.
DEPTH_CLASS: Final = tuple(min(max(depth - 1, 0).bit_length(), 5) for depth in range(_MAX_DEPTH))
_NUM_DEPTH_CLASSES: Final = 6
_NUM_KINDS: Final = 2 << len(SOURCES)  # of evidence
# Both again, as the compiled library reads them.
_EDGES: Final = np.array(BIN_EDGES)
_DEPTH_CLASSES: Final = np.array(DEPTH_CLASS, dtype=np.int64)
# As many outcomes as the confidence itself is worth at first, and as a bin remembers.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 400.0
_KEPT: Final = 1.0 - 1.0 / _MEMORY
_REFIT_EVERY: Final = 32
LEAST_LIKELY: Final = 0.001
MOST_LIKELY: Final = 0.999


# (confidence, sources, depth) -> the chance that a guess is right where its parent was. The root's
# children have depth 1.
Calibrate = Callable[[float, int, int], float]


def as_confident(confidence: float, sources: int, depth: int) -> float:
    """Take a source at its word."""
    return confidence


def pool_adjacent_violators(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that never falls (weighted least squares)."""
    level: list[tuple[float, float, int]] = []  # (mean, weight, how many values)
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while level and level[-1][0] > mean:
            left_mean, left_total, left_count = level.pop()
            mean = (left_mean * left_total + mean * total) / (left_total + total)
            total, count = total + left_total, count + left_count
        level.append((mean, total, count))
    return [mean for mean, _, count in level for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCalibration:
    """A calibration for greedy or for sampling requests, which follows what is learnt later."""

    of: "EdgeCalibration"
    """The compiled library reads its `table`."""
    chance: Calibrate
    """The chance that a guess is right where its parent was."""
    is_greedy: bool

    def __call__(self, confidence: float, sources: int, depth: int) -> float:
        """Return the chance that such a guess is right where its parent was."""
        return self.chance(confidence, sources, depth)


class EdgeCalibration:
    """Calibrated edge probabilities by sources, depth, and whether the request samples.

    A token that several sources guessed has a curve of its own: their agreement says more than
    each of them, and so does the small model's silence where it was asked. `sources` are bits
    (`outrider.verifier.token_tree.SOURCE_BIT`, `MODEL_SILENT`). A kind that was never seen at a
    depth is taken from the other bins.
    """

    def __init__(self) -> None:
        num_curves = _NUM_KINDS * (1 + 2 * _NUM_DEPTH_CLASSES)
        # Outcomes by curve and bin: first a curve for each kind of evidence, then one for each
        # kind, depth class and way of sampling. What such a one has not seen yet it takes from its
        # kind's.
        self._num_right, self._num_judged, self._sum_confidence = (
            array("d", bytes(8 * num_curves * _NUM_BINS)) for _ in range(3)
        )
        self._num_unfitted = array("q", bytes(8 * num_curves))
        # What a bin adds to a confidence: 0 until something is known.
        self._of_kinds = [[0.0] * _NUM_BINS for _ in range(_NUM_KINDS)]
        self._of_curves = [
            shifts for shifts in self._of_kinds for _ in range(2 * _NUM_DEPTH_CLASSES)
        ]
        self._is_fitted = [False] * len(self._of_curves)
        # The last ones again, for calibration by the library and on the device: kept up to date.
        self._shifts = np.zeros((_NUM_KINDS, _NUM_DEPTH_CLASSES, 2, _NUM_BINS))
        self._version = 0
        self._of_requests = [
            RequestCalibration(of=self, chance=self._chance(is_greedy), is_greedy=is_greedy)
            for is_greedy in (False, True)
        ]
        self.table = CalibrationTable(
            shifts=self._shifts.ctypes.data,
            edges=_EDGES.ctypes.data,
            depth_class=_DEPTH_CLASSES.ctypes.data,
            num_right=self._num_right.buffer_info()[0],
            num_judged=self._num_judged.buffer_info()[0],
            sum_confidence=self._sum_confidence.buffer_info()[0],
            num_unfitted=self._num_unfitted.buffer_info()[0],
            num_edges=len(BIN_EDGES),
            num_depths=_MAX_DEPTH,
            num_classes=_NUM_DEPTH_CLASSES,
            num_kinds=_NUM_KINDS,
            refit_every=_REFIT_EVERY,
            least=LEAST_LIKELY,
            most=MOST_LIKELY,
            kept=_KEPT,
        )
        """The same for the compiled library, as long as this is there."""
        self.table_address = ctypes.addressof(self.table)

    @property
    def version(self) -> int:
        """Grows whenever a shift changes."""
        return self._version

    def shifts(self) -> npt.NDArray[np.float32]:
        """The shifts of confidences: [is_greedy, kind of evidence, depth class, bin], a copy.

        Bins and depth classes are those of `BIN_EDGES` and `DEPTH_CLASS`.
        """
        return np.ascontiguousarray(self._shifts.transpose(2, 0, 1, 3), dtype=np.float32)

    def of_requests(self, *, is_greedy: bool) -> RequestCalibration:
        """Return the calibration of greedy or of sampling requests; it follows what is learnt."""
        return self._of_requests[is_greedy]

    def _chance(self, is_greedy: bool) -> Calibrate:
        curves, depth_class, edges = self._of_curves, DEPTH_CLASS, BIN_EDGES

        def probability(confidence: float, sources: int, depth: int) -> float:
            # This runs for every guess of every sequence.
            own_class = depth_class[depth if depth < _MAX_DEPTH else -1]
            shifts = curves[(sources * _NUM_DEPTH_CLASSES + own_class) * 2 + is_greedy]
            shifted = confidence + shifts[bisect_right(edges, confidence)]
            if shifted > MOST_LIKELY:
                return MOST_LIKELY
            return shifted if shifted > LEAST_LIKELY else LEAST_LIKELY

        return probability

    def observe(
        self, confidence: float, was_right: bool, *, sources: int, depth: int, is_greedy: bool
    ) -> None:
        """Learn from a guess whose parent was accepted."""
        depth_class = DEPTH_CLASS[min(depth, _MAX_DEPTH - 1)]
        own = (sources * _NUM_DEPTH_CLASSES + depth_class) * 2 + is_greedy
        index = bisect_right(BIN_EDGES, confidence)
        right, judged, sums = self._num_right, self._num_judged, self._sum_confidence
        for curve in (sources, _NUM_KINDS + own):
            each = curve * _NUM_BINS + index
            right[each] = _KEPT * right[each] + was_right
            judged[each] = _KEPT * judged[each] + 1.0
            sums[each] = _KEPT * sums[each] + confidence
            self._num_unfitted[curve] += 1
            if self._num_unfitted[curve] >= _REFIT_EVERY:
                self.fit(curve)

    def fit(self, curve: int) -> None:
        """Fit a curve to its outcomes; what follows it changes too.

        `curve`: below `_NUM_KINDS` that of a kind of evidence, then those of kinds at depths.
        """
        self._num_unfitted[curve] = 0
        self._version += 1
        if curve < _NUM_KINDS:
            shifts = self._of_kinds[curve] = self._fitted(curve, [0.0] * _NUM_BINS)
            first = curve * 2 * _NUM_DEPTH_CLASSES
            followers = range(first, first + 2 * _NUM_DEPTH_CLASSES)
            own = [number for number in followers if not self._is_fitted[number]]
        else:
            number = curve - _NUM_KINDS
            kind = number // (2 * _NUM_DEPTH_CLASSES)
            shifts, own = self._fitted(curve, self._of_kinds[kind]), [number]
            self._is_fitted[number] = True
        table = self._shifts.reshape(-1, _NUM_BINS)  # a view: [curves of kinds at depths, bins]
        for number in own:
            self._of_curves[number] = shifts
            table[number] = shifts

    def _fitted(self, curve: int, believed: list[float]) -> list[float]:
        """Return the shifts that a curve's outcomes ask for; `believed`: shifts before any."""
        first = curve * _NUM_BINS
        lows, highs = (0.0, *BIN_EDGES), (*BIN_EDGES, 1.0)
        means, values, weights = [], [], []
        for index in range(_NUM_BINS):
            judged = self._num_judged[first + index]
            middle = (lows[index] + highs[index]) / 2
            mean = self._sum_confidence[first + index] / judged if judged else middle
            means.append(mean)
            prior = min(max(mean + believed[index], 0.0), 1.0)
            right = self._num_right[first + index] + _PRIOR_WEIGHT * prior
            values.append(right / (judged + _PRIOR_WEIGHT))
            weights.append(judged + _PRIOR_WEIGHT)
        fitted = pool_adjacent_violators(values, weights)
        return [value - mean for value, mean in zip(fitted, means, strict=True)]
