"""Constraints on JSON strings and numbers, in a form that the grammar compiler enforces."""

import json
import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from outrider.engine.grammar.grammar import InvalidGrammarError
from outrider.engine.grammar.json_disjoint import types_of
from outrider.engine.grammar.json_keywords import EXACT_BELOW, shown, unsupported
from outrider.engine.grammar.json_lengths import DATES, FORMATS, Lengths, of_length

MAX_PATTERN_CHARS: Final = 2048

StringRule = str | Lengths
"""Rules for a string's content: a regular expression for all of it, or its length."""

_MAX_UNROLLED: Final = 128  # repetitions up to which the compiler keeps JSON's rules for strings
_MAX_SHORTEST: Final = 20_000
_MAX_FACTOR: Final = 1000  # its automaton has a state for each remainder
_MAX_LISTED: Final = 1000
_STEP: Final = Decimal("0.000001")  # the compiler writes numbers within bounds with six decimals
_NO_LINE_END: Final = r"[^\n\r\u2028\u2029]"
_WORD: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_PATTERNS: Final[Mapping[str, str]] = {
    **DATES,
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_WORD}(\.{_WORD})+$",
    "hostname": rf"^{_WORD}(\.{_WORD})*$",
}


def prepare_string(own: dict[str, Any], place: str) -> dict[str, Any] | StringRule:
    """Return what a string holds, or keywords that the compiler enforces by itself.

    The compiler's own form of lengths lets raw tabs through. Raises InvalidGrammarError.
    """
    lengths = Lengths(shortest=own.get("minLength", 0), longest=own.get("maxLength"))
    if lengths.is_empty:
        raise InvalidGrammarError(
            f"{place}: minLength={lengths.shortest} is over maxLength={lengths.longest}"
        )
    if lengths.shortest > _MAX_SHORTEST:
        raise InvalidGrammarError(
            f"{place}: minLength={lengths.shortest} is over the limit of {_MAX_SHORTEST}"
        )
    format_ = own.get("format")
    is_enforced = isinstance(format_, str) and (format_ in FORMATS or format_ in _PATTERNS)
    if "pattern" in own:
        if is_enforced:
            raise unsupported(place, f"format {format_!r} beside pattern")
        return of_length(checked_pattern(own["pattern"], place), lengths, place)
    if isinstance(format_, str) and is_enforced:
        narrowed = lengths.of_format(format_, place)
        if narrowed is not None:
            return narrowed
        return _PATTERNS.get(format_) or {"format": format_}
    if lengths.is_free:
        return {}
    if max(lengths.shortest, lengths.longest or 0) > _MAX_UNROLLED:
        return lengths
    longest = "" if lengths.longest is None else lengths.longest
    return {"pattern": rf"^[\s\S]{{{lengths.shortest},{longest}}}$"}


def checked_pattern(pattern: str, place: str) -> str:
    """Return the pattern, in which no `.` stands for the end of a line.

    Raises InvalidGrammarError for anchors that the compiler ignores.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidGrammarError(
            f"{place}: the pattern has {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}"
        )
    last = len(pattern) - 1
    bare = list(_bare_characters(pattern))
    if any((c == "^" and i > 0) or (c == "$" and i < last) for i, c in bare):
        raise unsupported(place, "^ or $ in the middle of a pattern")
    dots = {i for i, c in bare if c == "."}
    return "".join([_NO_LINE_END if i in dots else c for i, c in enumerate(pattern)])


def _bare_characters(pattern: str) -> Iterator[tuple[int, str]]:
    """Places and characters outside classes that no backslash escapes, in one walk."""
    is_escaped = is_in_class = False
    for index, char in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        else:
            yield index, char


def prepare_number(own: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
    """Return the bounds of a number or an integer, each one once. Raises InvalidGrammarError."""
    for name, value in own.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.startswith("exclusive") and isinstance(value, bool):
            raise InvalidGrammarError(
                f"{place}: {name}={json.dumps(value)} is of an old draft; give the number itself, "
                f"as in {name}: 5, without {name.removeprefix('exclusive').lower()}"
            )
        # Compared, not converted: an integer of 400 digits is no float. NaN is below nothing.
        if not is_number or not abs(value) < EXACT_BELOW:
            raise InvalidGrammarError(
                f"{place}: {name}={shown(value)} must be a number below 2**53"
            )
    if kind == "integer":
        return _integer(own, place)
    if "multipleOf" in own:
        raise unsupported(place, "multipleOf of a number that is not an integer")
    low, high = own.get("minimum"), own.get("maximum")
    if low is not None and own.get("exclusiveMinimum", low - 1) >= low:
        del own["minimum"]
    elif low is not None:
        own.pop("exclusiveMinimum", None)
    if high is not None and own.get("exclusiveMaximum", high + 1) <= high:
        del own["maximum"]
    elif high is not None:
        own.pop("exclusiveMaximum", None)
    return _within_steps(own, place)


def _within_steps(own: dict[str, Any], place: str) -> dict[str, Any]:
    """The same bounds for numbers of six decimals. Raises where none lies between them."""
    bounds: dict[str, Any] = {}
    ends: dict[str, Decimal] = {}
    for name, value in own.items():
        is_low = name.lower().endswith("minimum")
        exact = Decimal(str(value))
        rounded = exact.quantize(_STEP, ROUND_CEILING if is_low else ROUND_FLOOR)
        is_excluded = name.startswith("exclusive") and rounded == exact
        bounds[name if is_excluded else "minimum" if is_low else "maximum"] = float(rounded)
        step = _STEP if is_low else -_STEP
        ends["low" if is_low else "high"] = rounded + (step if is_excluded else 0)
    if len(ends) == 2 and ends["low"] > ends["high"]:
        raise InvalidGrammarError(f"{place}: no number of six decimals lies within the bounds")
    return bounds


def _integer(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Whole bounds, both included; multiples within bounds are listed."""
    lows = [math.ceil(own["minimum"])] if "minimum" in own else []
    lows += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
    highs = [math.floor(own["maximum"])] if "maximum" in own else []
    highs += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
    bounds = ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})
    if lows and highs and max(lows) > min(highs):
        raise InvalidGrammarError(f"{place}: no integer lies between minimum and maximum")
    factor = own.get("multipleOf", 1)
    if factor == 1:
        return bounds
    if factor != int(factor) or not 1 <= factor <= _MAX_FACTOR:
        raise unsupported(place, f"multipleOf={shown(factor)} (only 1 to {_MAX_FACTOR}, whole)")
    factor = int(factor)
    if not bounds:
        return {"multipleOf": factor}
    if len(bounds) < 2 or (bounds["maximum"] - bounds["minimum"]) // factor > _MAX_LISTED:
        raise unsupported(place, f"multipleOf beside bounds with over {_MAX_LISTED} multiples")
    first = -(-bounds["minimum"] // factor) * factor
    values = list(range(first, bounds["maximum"] + 1, factor))
    if not values:
        raise InvalidGrammarError(f"{place}: no multiple of {factor} lies within the bounds")
    return {"enum": values}


def prepare_values(schema: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    """Return the constant, or the enum's values that are of the schema's type.

    Raises InvalidGrammarError.
    """
    values = [schema["const"]] if name == "const" else schema["enum"]
    if not values:
        raise InvalidGrammarError(f"{place}: enum must be a list, not empty")
    kinds = schema.get("type")
    if kinds is not None:
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        values = [value for value in values if types_of(value) & wanted]
        if not values:
            raise InvalidGrammarError(f"{place}: no value of {name} has the type {kinds!r}")
    for value in values:
        _check_exact(value, place)
    return {"enum": values}


def _check_exact(value: Any, place: str) -> None:
    """Raise for a number that the compiler would write otherwise than the schema does."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_exact(item, place)
    elif isinstance(value, int | float) and not abs(value) < EXACT_BELOW:
        raise InvalidGrammarError(f"{place}: the number {shown(value)} must be below 2**53")
