"""Bounds on the length of strings that have a pattern or a format too.

A grammar cannot say "and". So a pattern whose parts follow one another has the numbers of its
repetitions narrowed until its texts are within the bounds, and a format gets a pattern of its own.
Texts may be excluded that would conform; none is let through that does not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.engine.grammar.grammar import InvalidGrammarError
from outrider.engine.grammar.json_keywords import unsupported

FORMATS: Final[Mapping[str, tuple[int, int | None]]] = {
    "date": (10, 10), "uuid": (36, 36), "ipv4": (7, 15), "ipv6": (2, 45),
    "time": (9, 24), "date-time": (20, 35), "duration": (3, None),
}  # fmt: skip
"""The shortest and longest text of each format whose lengths are known."""

_LETTER: Final = "[A-Za-z0-9_+-]"
_WORD: Final = "[A-Za-z0-9]"
_MOST: Final = 31  # repetitions of up to two characters each: labels end at 63, names at 64
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
DATES: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$",
}  # fmt: skip
"""Patterns of dates that exist and of times, without leap seconds."""
# The shortest texts of formats with a fraction of seconds and a zone, and their length.
_SHORTEST: Final[Mapping[str, tuple[str, int]]] = {
    "date-time": (f"^{_DATE}T{_HOUR}:[0-5][0-9]Z$", 20), "time": (f"^{_HOUR}:[0-5][0-9]Z$", 9),
}  # fmt: skip
# One character, and how often it may stand in a row.
_PART: Final = re.compile(
    r"""(\[(?:\\.|[^\]\\])*\]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}
    |\\[^ux0-9bBkpPc]|[^\\\[\]()|*+?{}^$])
    (?:\{(\d{1,9})(,?)(\d{0,9})\}|([*+?]))?\??""",
    re.S | re.X,
)
_COUNTS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Bounds of a string's number of characters."""

    shortest: int = 0
    longest: int | None = None

    @property
    def is_free(self) -> bool:
        """True if any text is within the bounds."""
        return self.shortest == 0 and self.longest is None

    @property
    def is_empty(self) -> bool:
        """True if no text is."""
        return self.longest is not None and self.shortest > self.longest

    def hold_for(self, low: int, high: int | None) -> bool:
        """True if all texts of `low` to `high` characters are within the bounds."""
        return self.shortest <= low and (
            self.longest is None or (high is not None and high <= self.longest)
        )

    def of_format(self, name: str, place: str) -> str | None:
        """A pattern for texts of a format within the bounds; None where all of them are.

        Raises InvalidGrammarError for bounds that cannot be enforced beside the format.
        """
        if self.hold_for(*FORMATS.get(name, (1, None))):
            return None
        pattern, length = _SHORTEST.get(name, ("", 0))
        if pattern and self.hold_for(length, length):
            return pattern
        longest = 1000 if self.longest is None else self.longest
        if name == "hostname" and longest:
            most, least = min(_MOST, (longest - 1) // 2), max(self.shortest - 1, 0)
            if least <= most:
                return f"^{_WORD}([.-]?{_WORD}){{{least},{most}}}$"
        if name == "email" and longest >= 6:
            top = 2 if longest < 20 else 6
            most, least = min(_MOST, (longest - 4 - top) // 4), max(self.shortest - 6, 0)
            if least <= most:
                return (
                    rf"^{_LETTER}(\.?{_LETTER}){{{least},{most}}}"
                    rf"@{_WORD}([.-]?{_WORD}){{0,{most}}}\.[A-Za-z]{{2,{top}}}$"
                )
        raise unsupported(
            place, f"minLength={self.shortest}, maxLength={self.longest} beside format {name!r}"
        )


def of_length(pattern: str, lengths: Lengths, place: str) -> str:
    """The pattern, its repetitions narrowed so that all its texts are within the bounds.

    Raises InvalidGrammarError for a pattern with groups or alternatives beside bounds, and where no
    text of the pattern has such a length.
    """
    if lengths.is_free:
        return pattern
    parts = _parts(pattern.removeprefix("^"))
    if parts is None or any(high is not None and high < low for _, low, high in parts):
        raise unsupported(
            place, "minLength or maxLength beside a pattern with groups, alternatives or escapes"
        )
    lows = [low for _, low, _ in parts]
    rooms = [None if high is None else high - low for _, low, high in parts]
    slack = 0 if lengths.longest is None else lengths.longest - sum(lows)
    if lengths.longest is not None:
        rooms = _shared(rooms, max(slack, 0))
    for index, room in enumerate(rooms):
        missing = max(lengths.shortest - sum(lows), 0)
        more = missing if room is None else min(missing, room)
        lows[index] += more
        rooms[index] = None if room is None else room - more
    if sum(lows) < lengths.shortest or slack < 0:
        raise InvalidGrammarError(f"{place}: no text of the pattern has a length within the bounds")
    highs = ["" if room is None else low + room for low, room in zip(lows, rooms, strict=True)]
    counted = zip(parts, lows, highs, strict=True)
    return "^" + "".join([f"{part}{{{low},{high}}}" for (part, _, _), low, high in counted]) + "$"


def _parts(pattern: str) -> list[tuple[str, int, int | None]] | None:
    """One character's expression with its fewest and most repetitions, for each part."""
    parts: list[tuple[str, int, int | None]] = []
    position = 0
    while position < len(pattern) and pattern[position:] != "$":
        match = _PART.match(pattern, position)
        if match is None:
            return None
        part, least, comma, most, sign = match.groups()
        if least is None:
            parts.append((part, *_COUNTS.get(sign, (1, 1))))
        else:
            parts.append((part, int(least), int(most or least) if most or not comma else None))
        position = match.end()
    return parts


def _shared(rooms: list[int | None], slack: int) -> list[int | None]:
    """Repetitions that parts may have above their fewest: equal shares of `slack` in all."""
    shares = len(rooms) * [slack]
    order = sorted(range(len(rooms)), key=lambda i: (rooms[i] is None, rooms[i] or 0))
    for num_before, index in enumerate(order):
        share, room = slack // (len(order) - num_before), rooms[index]
        shares[index] = share if room is None else min(room, share)
        slack -= shares[index]
    return [*shares]
