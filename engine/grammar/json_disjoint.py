"""Tells whether the branches of a `oneOf` exclude each other, by types and constants.

A grammar cannot say "exactly one of": where no value fits two branches, it need not.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from outrider.engine.errors import InvalidGrammarError

MAX_DESCRIBED: Final = 128
"""Branches that are no constants; each is compared with each."""


def are_disjoint(branches: list[Any], target: Callable[[Any], dict[str, Any]], place: str) -> bool:
    """True if no value can fit two branches.

    `target`: what a branch's references end at; {} where nothing is known. Branches are schemas
    whose keywords have values of the right kind. Raises InvalidGrammarError for too many of them.
    """
    shapes = [target(branch) for branch in branches]
    listed = [values for shape in shapes if (values := _values(shape)) is not None]
    described = [_Described.of(shape, target) for shape in shapes if _values(shape) is None]
    if len(described) > MAX_DESCRIBED:
        raise InvalidGrammarError(
            f"{place}: {len(described)} branches without constants; the limit is {MAX_DESCRIBED}"
        )
    distinct: set[Hashable] = set()
    for values in listed:
        own = {_frozen(value) for value in values}
        if own & distinct:
            return False
        distinct |= own
    listed_types = {kind for values in listed for value in values for kind in types_of(value)}
    if listed and any(not d.types or d.types & listed_types for d in described):
        return False
    return all(one.excludes(other) for one, other in combinations(described, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """A branch that is no constant: its types (empty: any) and what its required tags may be."""

    types: frozenset[str]
    tags: dict[str, frozenset[Hashable]]

    @classmethod
    def of(cls, branch: dict[str, Any], target: Callable[[Any], dict[str, Any]]) -> "_Described":
        """Read a branch. Integers are numbers."""
        kinds = branch.get("type", [])
        types = frozenset([kinds] if isinstance(kinds, str) else kinds)
        tags: dict[str, frozenset[Hashable]] = {}
        if types == {"object"}:
            properties = branch.get("properties", {})
            for name in branch.get("required", ()):
                values = _values(target(properties.get(name)))
                if values is not None:
                    tags[name] = frozenset(map(_frozen, values))
        return cls(types=types | {"number"} if "integer" in types else types, tags=tags)

    def excludes(self, other: "_Described") -> bool:
        """True if no value fits both, by their types or by a tag that both require."""
        if self.types and other.types and not self.types & other.types:
            return True
        return any(
            name in other.tags and not values & other.tags[name]
            for name, values in self.tags.items()
        )


def types_of(value: Any) -> set[str]:
    """Name the types of JSON that a value has; a whole number has two."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _values(branch: dict[str, Any]) -> list[Any] | None:
    """The values of a constant or an enum; None for another schema."""
    if "const" in branch:
        return [branch["const"]]
    values: list[Any] | None = branch.get("enum")
    return values


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in, equal where the values are."""
    if isinstance(value, list):
        return ("list", *map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, _frozen(item)) for name, item in value.items()))
    return value  # type: ignore[no-any-return]
