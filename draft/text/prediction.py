"""Following a predicted answer: where in it the answer is, also when the two differ in places."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from outrider.draft.trees.guess import Guess

# Confidence after so many tokens in a row that were as predicted.
_TRUST: Final = [1.0 - 0.5 / (1 + run) for run in range(512)]
_START_RUN: Final = 2  # a client that sends a prediction means it
_MAX_RUN: Final = 200
# An alignment that broke after fewer tokens than this was a coincidence: the search goes on from
# where it was before.
_TRUSTED_RUN: Final = 4

_NUM_LOOKED_AT: Final = 32  # places where a pair of tokens occurs, in each direction
_PAIR_WINDOW: Final = 128  # how far away a pair of tokens alone is taken for the same place
_SINGLE_WINDOW: Final = 16  # the same for one token

# What may have happened to a prediction that stopped being right, as a diff has it: the next token
# was deleted from it, replaced in it, or inserted into it. The confidence in the first token, and
# what remains of it for every further token since.
_DELETED, _REPLACED, _INSERTED = 0.4, 0.3, 0.2
_FADING: Final = 0.75
_UNALIGNED_DEPTH: Final = 8
_LEAST: Final = 0.02


class PredictionCursor:
    """One answer's way through one prediction.

    While the answer says what was predicted, the cursor moves along. After a mismatch the answer's
    last three tokens are looked for in the prediction (or two, where those are unambiguous). The
    place nearest to the mismatch counts, first ahead of it.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._prediction = list(token_ids)
        self._next: int | None = 0  # of the prediction, None while not aligned
        self._run = _START_RUN
        # Where the last trusted alignment broke, in the prediction and in the answer.
        self._anchor = 0
        self._mismatch = 0
        self._was_realigned = False
        self._is_unbroken = True
        self._num_tokens = 0
        self._last_token_id = -1
        self._pair_ends: dict[tuple[int, int], list[int]] | None = None

    @property
    def is_aligned(self) -> bool:
        """True if it is known which token of the prediction comes next."""
        return self._next is not None

    @property
    def num_retraced(self) -> int | None:
        """Length of the answer while all of its tokens are as predicted, from the first on."""
        return self._next if self._is_unbroken else None

    def advance(self, token_ids: list[int], num_new: int) -> None:
        """Take in the last `num_new` of `token_ids`: the answer so far, maybe behind its prompt."""
        self._num_tokens = len(token_ids)
        first = self._num_tokens - num_new
        if self._next is not None:
            end = self._next + num_new
            if self._prediction[self._next : end] == token_ids[first:]:
                self._next = end
                self._run += num_new
                return
        for position in range(first, self._num_tokens):
            self._take(token_ids, position)
        self._last_token_id = token_ids[-1]

    def guesses(self, max_depth: int) -> list[Guess]:
        """Return what the prediction says comes next; several possibilities while not aligned."""
        if max_depth < 1:
            return []
        if self._next is not None:
            return self._chain(self._next, max_depth, min(self._run, _MAX_RUN), 1.0)
        depth = min(max_depth, _UNALIGNED_DEPTH)
        num_lost = self._num_tokens - self._mismatch
        fading = _FADING ** (num_lost - 1)
        guesses: list[Guess] = []
        seen: set[int] = set()
        deleted = self._nearest_single()
        for place, confidence in (
            (deleted, _DELETED),
            (self._anchor + num_lost, _REPLACED),
            (self._anchor, _INSERTED),
        ):
            if place is None or confidence * fading < _LEAST or place >= len(self._prediction):
                continue
            token_id = self._prediction[place]
            if token_id not in seen:
                seen.add(token_id)
                guesses += self._chain(place, depth, 0, confidence * fading)
        return guesses

    def _chain(self, start: int, depth: int, run: int, confidence: float) -> list[Guess]:
        """The prediction from `start` on, the first token's trust being scaled."""
        token_ids = self._prediction[start : start + depth]
        if not token_ids:
            return []
        edge_probs = _TRUST[run : run + len(token_ids)]
        if confidence < 1.0:
            edge_probs[0] = confidence
        return [Guess(token_ids=token_ids, edge_probs=edge_probs)]

    def _take(self, text: list[int], position: int) -> None:
        """Follow one token of the answer."""
        token_id = text[position]
        place = self._next
        if place is not None:
            if place < len(self._prediction) and self._prediction[place] == token_id:
                self._next = place + 1
                self._run += 1
                return
            if self._run >= _TRUSTED_RUN or not self._was_realigned:
                self._anchor, self._mismatch = place, position
            self._next = None
            self._is_unbroken = False
        self._realign(text, position)

    def _realign(self, text: list[int], position: int) -> None:
        """Find the text's end in the prediction, or stay lost."""
        if position < 1:
            return
        ends = self._ends().get((text[position - 1], text[position]))
        if ends is None:
            return
        split = bisect_left(ends, self._anchor)
        ahead = ends[split : split + _NUM_LOOKED_AT]
        behind = ends[max(0, split - _NUM_LOOKED_AT) : split][::-1]
        if position >= 2:
            before = text[position - 2]
            for end in (*ahead, *behind):
                if end >= 2 and self._prediction[end - 2] == before:
                    self._align(end, 3)
                    return
        # Two tokens are enough where they can only mean one place, not far from here.
        window = _PAIR_WINDOW + position - self._mismatch
        if len(ends) == 1 and abs(ends[0] - self._anchor) <= window:
            self._align(ends[0], 2)

    def _align(self, end: int, num_common: int) -> None:
        """The answer's last token is the one at `end`."""
        self._next = end + 1
        self._run = num_common - 1
        self._was_realigned = True

    def _nearest_single(self) -> int | None:
        """The place behind the nearest token ahead that equals the answer's last one."""
        window = self._prediction[self._anchor + 1 : self._anchor + 1 + _SINGLE_WINDOW]
        try:
            return self._anchor + 2 + window.index(self._last_token_id)
        except ValueError:
            return None

    def _ends(self) -> dict[tuple[int, int], list[int]]:
        """Return the positions after each pair of adjacent tokens in the prediction, ascending."""
        if self._pair_ends is None:
            self._pair_ends = {}
            pairs = zip(self._prediction, self._prediction[1:], strict=False)
            for end, pair in enumerate(pairs, 1):
                self._pair_ends.setdefault(pair, []).append(end)
        return self._pair_ends
