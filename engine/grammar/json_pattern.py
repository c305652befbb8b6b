"""Regular expressions of JSON schemas (ECMA-262) in the notation that llguidance reads (Rust's)."""

import itertools
import re
from collections.abc import Mapping
from typing import Final

from outrider.engine.errors import InvalidGrammarError

# What differs: classes of characters, the ends of lines, and operators in classes. Rust nests
# classes, so one form fits inside and outside of them.
_SPACE: Final = (
    r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
)
_ESCAPED: Final[Mapping[str, str]] = {
    r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]",
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip
_LITERAL: Final[Mapping[str, str]] = {"/": r"\/", "\n": r"\n", ".": r"[^\n\r\u{2028}\u{2029}]"}
_TOKEN: Final = re.compile(r"\\.|.", re.S)
# The beginning of a range of control characters, and negated classes without quote and backslash.
_CONTROLS: Final = re.compile(r"\\(x[01]|u00[01]|u\{0*1?[0-9a-fA-F]?\}|0|c)|[\x00-\x1f]")
_HAS_BOTH: Final = re.compile(
    r"\^([^\"\\\[\]-]|a-z|A-Z|0-9|\\[-\]nrt.()*+?$^|{}]|\[0-9(A-Za-z_)?\])*"
)
_PLAIN_ESCAPE: Final = re.compile(r"\\[^1-9k]", re.S)
_IRREGULAR: Final = re.compile(r"\\[1-9k]|\(\?<?[=!]")
_MAX_DEPTH: Final = 200

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


def is_regular(pattern: str) -> bool:
    """Return whether an expression has no look-around and no back-reference, as far as is seen."""
    return _IRREGULAR.search(_PLAIN_ESCAPE.sub("", pattern)) is None


def javascript(pattern: str, *, is_quoted: bool) -> str:
    """Return the same expression in Rust's notation, as it may stand between slashes.

    `is_quoted`: for what stands in a JSON string. Raises InvalidGrammarError for groups that are
    nested too deeply: llguidance takes seconds to say so.
    """
    out: list[str] = []
    depth = 0
    tokens = iter(_TOKEN.findall(pattern))
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth > _MAX_DEPTH:
            raise InvalidGrammarError(f"the pattern's groups are nested over {_MAX_DEPTH} deep")
        if token == "[":
            inner = list(itertools.takewhile(lambda token: token != "]", tokens))
            out.append(_class(inner, is_quoted=is_quoted))
        else:
            out.append(_ESCAPED.get(token) or _LITERAL.get(token, token))
    return "".join(out)


def _class(inner: list[str], *, is_quoted: bool) -> str:
    """A class of characters, from what stands between its brackets."""
    body = "".join(f"\\{one}" if one in "[&~/" else _ESCAPED.get(one, one) for one in inner)
    is_negated = inner[:1] == ["^"]
    # Within quotes llguidance 1.9.1 takes a class of most control characters for one that has quote
    # and backslash too. So it loses them where it may lack one of the two.
    if is_quoted and (_CONTROLS.search(body) or (is_negated and not _HAS_BOTH.fullmatch(body))):
        return rf"[[{body}]&&[^\x00-\x1f]]"
    return f"[{body}]"
