"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from operator import itemgetter


class _Needle:
    """One stop string and how much of it the text so far ends with (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("failure", "num_matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.num_matched = 0
        self.failure = [0] * len(word)
        length = 0
        for index in range(1, len(word)):
            while length and word[index] != word[length]:
                length = self.failure[length - 1]
            if word[index] == word[length]:
                length += 1
            self.failure[index] = length

    def feed(self, char: str) -> bool:
        """Advance by a character; return whether it completes the stop string."""
        word = self.word
        while self.num_matched and char != word[self.num_matched]:
            self.num_matched = self.failure[self.num_matched - 1]
        if char == word[self.num_matched]:
            self.num_matched += 1
        return self.num_matched == len(word)


class StopMatcher:
    """Finds the first stop string; tells how much text may be released meanwhile.

    Linear in the text for each stop string. Once found, it must not be fed again; `found` is the
    stop string then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._num_chars = 0
        self.found: str | None = None

    @property
    def num_held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((needle.num_matched for needle in self._needles), default=0)

    def skip(self, text: str) -> None:
        """Skip text in front of all that is pushed, in which no stop string is looked for."""
        self._num_chars += len(text)

    def interrupt(self) -> None:
        """Forget partial matches: no stop string goes on from here."""
        for needle in self._needles:
            needle.num_matched = 0

    def push(self, text: str) -> int | None:
        """Return the place in the whole text where a stop string begins (the earliest one)."""
        ends = []
        for needle in self._needles:
            for index, char in enumerate(text):
                if needle.feed(char):
                    start = self._num_chars + index + 1 - len(needle.word)
                    ends.append((start, needle.word))
                    break
        self._num_chars += len(text)
        if not ends:
            return None
        cut, self.found = min(ends, key=itemgetter(0))
        return cut
