"""A regular expression's grammar, as what stands between the quotes of a JSON string.

xgrammar reads the `pattern` of a JSON schema with an automaton of its own that mistakes some
expressions (in 0.2.8 `(-[0-9]+)?` also matches digits alone, and `a|a{0,2}` matches `aaa`). Its
conversion of a whole regular expression to rules is right. So these rules are taken, with the
characters that JSON forbids escaped or left out, and put in the place of the pattern.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from outrider.engine.grammar.grammar import InvalidGrammarError

_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\w+|.', re.S)
_CHARACTER: Final = re.compile(
    r"\\x((?i:[0-9a-f]{2}))|\\u((?i:[0-9a-f]{4}))|\\U((?i:[0-9a-f]{8}))|\\(.)|(.)", re.S
)
_ESCAPES: Final = {
    "0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27,
}  # fmt: skip
_LAST: Final = 0x10FFFF
_UNESCAPED: Final = r'[^"\\\0-\x1f]'
_ANY_CONTENT: Final = r'Regex("^([^\"\\\\\\x00-\\x1f]|\\\\[\"\\\\/bfnrt])*$")'
_MAX_BUDGET: Final = 2**31 - 1
_Range = tuple[int, int]  # first and last code point
# What JSON allows in a string only as an escape, and what no text can hold.
_FORBIDDEN: Final[tuple[_Range, ...]] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
# ECMA-262's white space, of which xgrammar's \s has the part below 256.
_SPACES: Final[tuple[_Range, ...]] = (
    (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F),
    (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_SPACES_BELOW_256: Final = "\\f\\n\\r\\t\\v \\xa0"
_OTHERS_THAN_SPACES: Final = "!-\\x9f\\xa1-\\U0010ffff"  # its \S in a class


def json_string_rules(grammar: str, name: str) -> str:
    """The rules of `grammar` (xgrammar's notation, root `root`), named after `name`.

    Raises InvalidGrammarError where a character class holds nothing that JSON allows unescaped.
    """
    tokens = _TOKEN.findall(grammar)
    return "".join(_rewritten(token, name) for token in tokens)


def length_rules(shortest: int, longest: int | None, name: str) -> str:
    """The rules of a JSON string's content by its number of characters, in time for any number.

    The first `shortest` characters are unescaped. What follows is counted with its escapes, so it
    may be shorter than it could be and is never longer.
    """
    if longest == shortest:
        return f"{name} ::= {_UNESCAPED}{{{shortest}}}\n"
    least = f"{_UNESCAPED}{{{shortest}}} " if shortest else ""
    budget = "" if longest is None else f"[max_chars={min(longest - shortest, _MAX_BUDGET)}]"
    return f"{name} ::= {least}{name}_rest\n{name}_rest{budget} ::= {_ANY_CONTENT}\n"


def exact(grammar: str) -> str:
    """Rules that xgrammar printed, so that it reads the same ones again.

    It prints `\\xdf` and reads as many hexadecimal digits as follow: "ß" before "e" would be lost.
    """
    return "".join(_spelled_out(token) for token in _TOKEN.findall(grammar))


def _spelled_out(token: str) -> str:
    if "\\x" not in token and "\\u" not in token:
        return token
    if token[0] == '"':
        return '"' + "".join(_spelled(point) for point, _ in _characters(token[1:-1])) + '"'
    negation = "^" if token.startswith("[^") else ""
    ranges = _ranges(token[1 + len(negation) : -1])
    return f"[{negation}" + "".join(f"{_spelled(a)}-{_spelled(b)}" for a, b in ranges) + "]"


def _rewritten(token: str, name: str) -> str:
    if token[0] == '"' and len(token) > 1:
        return _literal(token[1:-1])
    if token[0] == "[" and len(token) > 1:
        return _class(token[1:-1])
    if token == "root" or token.startswith("root_"):
        return name + token.removeprefix("root")
    return token


def _literal(text: str) -> str:
    """A string literal; what JSON escapes is written as an escape."""
    out = []
    for point, _ in _characters(text):
        if point in (0x22, 0x5C):
            out += [0x5C, point]
        elif point < 0x20:
            out += [ord(char) for char in f"\\u{point:04x}"]
        else:
            out.append(point)
    return '"' + "".join(map(_spelled, out)) + '"'


def _class(text: str) -> str:
    """A character class without what JSON forbids unescaped."""
    is_negated = text.startswith("^")
    ranges = list(_ranges(text[1:] if is_negated else text))
    if _OTHERS_THAN_SPACES in text:
        ranges = _without(ranges, _SPACES)
    if _SPACES_BELOW_256 in text:
        ranges += _SPACES
    if is_negated:
        ranges = _without([(0, _LAST)], ranges)
    ranges = _without(ranges, _FORBIDDEN)
    if not ranges:
        raise InvalidGrammarError(
            "a character class of a pattern holds only what JSON forbids in a string"
        )
    return "[" + "".join(f"{_spelled(a)}-{_spelled(b)}" for a, b in ranges) + "]"


def _ranges(text: str) -> Iterator[_Range]:
    """Return what a class lists, range by range."""
    characters = list(_characters(text))
    index = 0
    while index < len(characters):
        first, _ = characters[index]
        if index + 2 < len(characters) and characters[index + 1] == (0x2D, False):
            yield first, characters[index + 2][0]
            index += 3
        else:
            yield first, first
            index += 1


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """Code points, and whether each was escaped."""
    for match in _CHARACTER.finditer(text):
        *numbers, escaped, plain = match.groups()
        number = next((number for number in numbers if number), None)
        if number is not None:
            yield int(number, 16), True
        elif escaped is not None:
            yield _ESCAPES.get(escaped, ord(escaped)), True
        else:
            yield ord(plain), False


def _without(ranges: Iterable[_Range], holes: Iterable[_Range]) -> list[_Range]:
    """The ranges less the holes, in ascending order; both are sorted and walked once."""
    kept: list[_Range] = []
    ordered = _merged(holes)
    place = 0
    for first, last in _merged(ranges):
        while place < len(ordered) and ordered[place][1] < first:
            place += 1
        ahead = place  # a hole may reach into the next range too
        while ahead < len(ordered) and ordered[ahead][0] <= last:
            low, high = ordered[ahead]
            if first < low:
                kept.append((first, low - 1))
            first = max(first, high + 1)
            ahead += 1
        if first <= last:
            kept.append((first, last))
    return kept


def _merged(ranges: Iterable[_Range]) -> list[_Range]:
    """The same characters in ascending ranges that do not touch; empty ranges are left out."""
    merged: list[_Range] = []
    for first, last in sorted(ranges):
        if first > last:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _spelled(point: int) -> str:
    return f"\\U{point:08x}"
