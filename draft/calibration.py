"""From a source's confidence to the chance that its guess is accepted, learnt while serving.

A guess is judged only when the target reaches its parent, so every verdict gives one outcome for
each child along the accepted path. Confidences are cut into bins; each bin counts its outcomes with
decay and begins at the confidence itself; a running isotonic fit (pool adjacent violators: Ayer et
al., 1955; as a calibration: Zadrozny, Elkan, 2002) keeps the result in the confidences' order.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.request import SOURCES
from kernels.cpu.tree_library import CalibrationTable

# Beside the sources' bits: the small model was asked at this place and did not name the token.
MODEL_SILENT: Final = 1 << len(SOURCES)

BIN_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_NUM_BINS: Final = len(BIN_EDGES) + 1
_MAX_DEPTH: Final = 64
# Depths 1, 2, 3-4, 5-8, 9-16 and deeper behave alike within themselves.
DEPTH_CLASS: Final = tuple(min(max(depth - 1, 0).bit_length(), 5) for depth in range(_MAX_DEPTH))
_NUM_DEPTH_CLASSES: Final = 6
# Both again, as the compiled library reads them.
_EDGES: Final = np.array(BIN_EDGES)
_DEPTH_CLASSES: Final = np.array(DEPTH_CLASS, dtype=np.int64)
# As many outcomes as the confidence itself is worth at first, and as a bin remembers.
_PRIOR_WEIGHT: Final = 6.0
_MEMORY: Final = 400.0
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


@dataclass(slots=True)
class _Curve:
    """Outcomes of one kind of guess. What it has not seen yet it takes from a wider kind's."""

    wider: "_Curve | None" = None
    num_right: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    num_judged: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    sum_confidence: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    # What a bin adds to a confidence: 0 until something is known.
    shift: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    is_fitted: bool = False
    num_unfitted: int = 0

    def shifts(self) -> list[float]:
        """Return each bin's shift: this curve's own, or the wider kind's until it is fitted."""
        return self.shift if self.is_fitted or self.wider is None else self.wider.shift

    def observe(self, confidence: float, was_right: bool) -> bool:
        """Learn one outcome; returns whether the shifts are new."""
        index = bisect_right(BIN_EDGES, confidence)
        kept = 1.0 - 1.0 / _MEMORY
        self.num_right[index] = kept * self.num_right[index] + was_right
        self.num_judged[index] = kept * self.num_judged[index] + 1.0
        self.sum_confidence[index] = kept * self.sum_confidence[index] + confidence
        self.num_unfitted += 1
        if self.num_unfitted < _REFIT_EVERY:
            return False
        self._fit()
        return True

    def _fit(self) -> None:
        self.num_unfitted, self.is_fitted = 0, True
        believed = [0.0] * _NUM_BINS if self.wider is None else self.wider.shift
        lows, highs = (0.0, *BIN_EDGES), (*BIN_EDGES, 1.0)
        means, values, weights = [], [], []
        for index in range(_NUM_BINS):
            judged = self.num_judged[index]
            middle = (lows[index] + highs[index]) / 2
            mean = self.sum_confidence[index] / judged if judged else middle
            means.append(mean)
            prior = min(max(mean + believed[index], 0.0), 1.0)
            right = self.num_right[index] + _PRIOR_WEIGHT * prior
            values.append(right / (judged + _PRIOR_WEIGHT))
            weights.append(judged + _PRIOR_WEIGHT)
        fitted = pool_adjacent_violators(values, weights)
        self.shift = [value - mean for value, mean in zip(fitted, means, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCalibration:
    """A calibration for greedy or for sampling requests, which follows what is learnt later.

    chance: of a guess, to be right where its parent was. table: the same for the compiled library,
    which reads `shifts`.
    """

    chance: Calibrate
    is_greedy: int
    table: CalibrationTable
    shifts: npt.NDArray[np.float64]

    def __call__(self, confidence: float, sources: int, depth: int) -> float:
        """Return the chance that such a guess is right where its parent was."""
        return self.chance(confidence, sources, depth)


class EdgeCalibration:
    """Calibrated edge probabilities by sources, depth, and whether the request samples.

    A token that several sources guessed has a curve of its own: their agreement says more than
    each of them, and so does the small model's silence where it was asked. `sources` are bits
    (`engine.trees.token_tree.SOURCE_BIT`, `MODEL_SILENT`). A kind that was never seen at a depth is
    taken from the other bins.
    """

    def __init__(self) -> None:
        num_kinds = 2 << len(SOURCES)  # of evidence
        self._wide = [_Curve() for _ in range(num_kinds)]
        self._curves = [
            _Curve(wider=wide) for wide in self._wide for _ in range(2 * _NUM_DEPTH_CLASSES)
        ]
        # All shifts again, for calibration by the library and on the device: kept up to date.
        self._shifts = np.zeros((num_kinds, _NUM_DEPTH_CLASSES, 2, _NUM_BINS))
        self._version = 0
        self._of_requests = tuple(self._request_calibration(is_greedy) for is_greedy in (0, 1))

    @property
    def version(self) -> int:
        """Grows whenever a shift changes."""
        return self._version

    def shifts(self) -> npt.NDArray[np.float32]:
        """The shifts of confidences: [is_greedy, kind of evidence, depth class, bin], a copy.

        Bins and depth classes are those of `BIN_EDGES` and `DEPTH_CLASS`.
        """
        return np.ascontiguousarray(self._shifts.transpose(2, 0, 1, 3), dtype=np.float32)

    def of_requests(self, *, is_greedy: bool) -> "RequestCalibration":
        """Return the calibration of greedy or of sampling requests; it follows what is learnt."""
        return self._of_requests[is_greedy]

    def _request_calibration(self, is_greedy: int) -> "RequestCalibration":
        table = CalibrationTable(
            shifts=self._shifts.ctypes.data,
            edges=_EDGES.ctypes.data,
            depth_class=_DEPTH_CLASSES.ctypes.data,
            num_edges=len(BIN_EDGES),
            num_depths=_MAX_DEPTH,
            num_classes=_NUM_DEPTH_CLASSES,
            least=LEAST_LIKELY,
            most=MOST_LIKELY,
        )
        return RequestCalibration(
            chance=self._chance(is_greedy), is_greedy=is_greedy, table=table, shifts=self._shifts
        )

    def _chance(self, is_greedy: int) -> Calibrate:
        curves, depth_class, edges = self._curves, DEPTH_CLASS, BIN_EDGES

        def probability(confidence: float, sources: int, depth: int) -> float:
            # This runs for every guess of every sequence.
            place = depth_class[depth if depth < _MAX_DEPTH else -1]
            curve = curves[(sources * _NUM_DEPTH_CLASSES + place) * 2 + is_greedy]
            shifted = confidence + curve.shifts()[bisect_right(edges, confidence)]
            if shifted > MOST_LIKELY:
                return MOST_LIKELY
            return shifted if shifted > LEAST_LIKELY else LEAST_LIKELY

        return probability

    def observe(
        self, confidence: float, was_right: bool, *, sources: int, depth: int, is_greedy: bool
    ) -> None:
        """Learn from a guess whose parent was accepted."""
        place = DEPTH_CLASS[min(depth, _MAX_DEPTH - 1)]
        curve = self._curves[(sources * _NUM_DEPTH_CLASSES + place) * 2 + is_greedy]
        if self._wide[sources].observe(confidence, was_right):
            self._note_kind(sources)
        if curve.observe(confidence, was_right):
            self._shifts[sources, place, int(is_greedy)] = curve.shift
            self._version += 1

    def _note_kind(self, sources: int) -> None:
        """A kind's wide curve is new: all of its curves follow that have seen too little."""
        first = sources * _NUM_DEPTH_CLASSES * 2
        own = self._curves[first : first + _NUM_DEPTH_CLASSES * 2]
        table = self._shifts[sources].reshape(-1, _NUM_BINS)  # a view: [depth class * 2, bins]
        for number, curve in enumerate(own):
            table[number] = curve.shifts()
        self._version += 1
