"""Bounds of numbers in JSON schemas, which are read as doubles."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from outrider.engine.errors import InvalidGrammarError

BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""The keywords."""
_EXACT_BELOW: Final = 2**53  # whole numbers that are exact as the doubles that llguidance reads
_STEPS: Final = (Decimal("1e-6"), Decimal("1e-9"), Decimal("1e-12"))


def is_exact(value: Any) -> bool:
    """Return whether the numbers in a value are read as they are written."""
    if isinstance(value, dict | list):
        return all(map(is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) < _EXACT_BELOW


def round_bounds(own: dict[str, Any], place: str) -> None:
    """Replace bounds of many decimals by ones of fewer within them.

    Numbers are read as doubles: one of sixteen digits may lie beyond a bound that its text keeps.
    """
    ends = {name: own[name] for name in BOUNDS if name != "multipleOf" and name in own}
    if own.get("type") == "integer" or not all(map(_is_number, ends.values())):
        return
    found = {name: Decimal(str(value)) for name, value in ends.items()}
    lows = [value for name, value in found.items() if name.endswith("inimum")]
    highs = [value for name, value in found.items() if name.endswith("aximum")]
    width = abs(min(highs) - max(lows)) if lows and highs else Decimal(1)
    step = next((step for step in _STEPS if step * 100 <= width), _STEPS[-1])
    for name, value in found.items():
        is_low = name.endswith("inimum")
        rounded = value.quantize(step, ROUND_CEILING if is_low else ROUND_FLOOR)
        if rounded == value:
            continue
        del own[name]
        bound, bounded = ("minimum", max) if is_low else ("maximum", min)
        own[bound] = bounded(float(rounded), own.get(bound, float(rounded)))
    if "minimum" in own and "maximum" in own and own["minimum"] > own["maximum"]:
        raise InvalidGrammarError(f"{place}: no number of twelve decimals lies within the bounds")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
