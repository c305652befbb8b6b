"""Leaves out of a JSON schema what cannot be enforced, and no more than a search finds.

`prepare_schema` knows many such keywords. What else the compiler refuses is found by trying: the
keywords of a schema, those of outer schemas first, are added until it refuses. The last one is left
out, and the search goes on behind it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.json_schema import Schema, prepare_schema
from outrider.engine.grammar.json_shape import (
    MAX_DEPTH,
    SCHEMA_MAPS,
    TYPES,
    combines,
    pointer_part,
)

SchemaCheck = Callable[[Schema | bool], None]
"""Raises InvalidGrammarError for a prepared schema that cannot be compiled."""

MAX_SEARCH_S: Final = 0.15
"""Processor time for a grammar's schemas together. What is not known by then is left out."""
MAX_POINTER_CHARS: Final = 64 * 2**10
_ATOMS: Final = ("const", "enum", "required", "type", "default", "examples", "example")
_DESCRIPTIONS: Final = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
)
_DEFINITIONS: Final = ("$defs", "definitions")

_Path = tuple[str | int, ...]


class LeavingOut:
    """Prepares the lenient schemas of one grammar, within one budget of time."""

    def __init__(self, check: SchemaCheck | None) -> None:
        """`check`: tells what can be enforced; None: nothing but the type of a whole schema."""
        self._check = check
        self._until_s = time.thread_time() + MAX_SEARCH_S
        self.has_prepared = False

    def prepare(self, schema: Any) -> tuple[Schema | bool, tuple[str, ...]]:
        """Return a schema as `prepare_schema` does, and JSON pointers to what it lacks.

        The pointer "" stands for most of the schema.
        """
        self.has_prepared = True
        prepared, pointers = _loosest(schema)
        if self._check is not None:
            prepared, pointers = self._search(schema, self._check)
        if sum(map(len, pointers)) > MAX_POINTER_CHARS:
            pointers = [""]
        return prepared, tuple(pointers)

    def _search(self, schema: Any, check: SchemaCheck) -> tuple[Schema | bool, list[str]]:
        for keeps_one_of in (True, False):
            trial = _Trial(schema, check, is_closing=None, keeps_one_of=keeps_one_of)
            found = trial.run(frozenset())
            if found is not None:
                return found
        if not isinstance(schema, dict):
            return _loosest(schema)
        is_closing = not combines(schema)
        trial = _Trial(schema, check, is_closing=is_closing, keeps_one_of=False)
        units, too_deep = _units(schema)
        dropped = set(too_deep)
        low = 0  # so many of the first units can be compiled
        while self._has_time():
            found = trial.run(frozenset(dropped))
            if found is not None:
                return found[0], [*_pointers(frozenset(dropped)), *found[1]]
            high = len(units)
            while high - low > 1 and self._has_time():
                middle = (low + high) // 2
                if trial.run(frozenset((*dropped, *units[middle:]))) is None:
                    high = middle
                else:
                    low = middle
            if high - low == 1:
                dropped.add(units[low])
                low = high
        dropped.update(units[low:])
        found = trial.run(frozenset(dropped)) if low else None
        return (found[0], [""]) if found is not None else _loosest(schema)

    def _has_time(self) -> bool:
        return time.thread_time() < self._until_s


def _loosest(schema: Any) -> tuple[Schema | bool, list[str]]:
    """Return what is enforced of a schema of which nothing is known: its type."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in TYPES:
        return prepare_schema({"type": kind}), [""]
    return True, [""]


class _Trial:
    """Compiles a schema without some of its keywords."""

    def __init__(
        self, schema: Any, check: SchemaCheck, *, is_closing: bool | None, keeps_one_of: bool
    ) -> None:
        self._schema = schema
        self._check = check
        self._is_closing = is_closing
        self._keeps_one_of = keeps_one_of

    def run(self, dropped: frozenset[_Path]) -> tuple[Schema | bool, list[str]] | None:
        """Return the prepared schema, and pointers to what else it lacks; None if it is refused."""
        schema = _without(self._schema, (), dropped) if dropped else self._schema
        left_out: list[str] = []
        try:
            prepared = prepare_schema(
                schema,
                left_out=left_out,
                is_closing=self._is_closing,
                keeps_one_of=self._keeps_one_of,
            )
            self._check(prepared)
        except InvalidGrammarError:
            return None
        return prepared, left_out


def _pointers(paths: frozenset[_Path]) -> list[str]:
    """Return JSON pointers to the paths that do not lie within another one."""
    outer = [
        path for path in paths if not any(path[:length] in paths for length in range(1, len(path)))
    ]
    return sorted("".join(f"/{pointer_part(part)}" for part in path) for path in outer)


def _units(schema: Schema) -> tuple[list[_Path], list[_Path]]:
    """Return the places of all keywords, outer ones first; and of those that are nested too deeply.

    Definitions come last: what refers to them is refused for what they say, and not for itself.
    """
    units: list[_Path] = []
    too_deep: list[_Path] = []
    waiting: deque[tuple[Schema, _Path]] = deque([(schema, ())])
    definitions: deque[tuple[Schema, _Path]] = deque()
    while waiting or definitions:
        here, path = (waiting or definitions).popleft()
        names = [(*path, name) for name in sorted(here, key=_rank)]
        if len(path) > MAX_DEPTH - 4:
            too_deep += names
            continue
        units += names
        for name, value in here.items():
            later = definitions if name in _DEFINITIONS else waiting
            for inner, place in _inner(name, value, (*path, name)):
                if name == "patternProperties":
                    units.append(place)
                if isinstance(inner, dict):
                    later.append((inner, place))
    return units, too_deep


def _rank(name: str) -> int:
    """Return the place of a keyword among those of its schema."""
    if name == "type":
        return 0
    if name in _DEFINITIONS:
        return 1
    return 3 if name in _DESCRIPTIONS[2:] else 2


def _inner(name: str, value: Any, place: _Path) -> Iterator[tuple[Any, _Path]]:
    """Yield the schemas in a keyword's value, with their places."""
    if name in _ATOMS:
        return
    if name in SCHEMA_MAPS and isinstance(value, dict):
        yield from ((inner, (*place, key)) for key, inner in value.items())
    elif isinstance(value, list):
        yield from ((inner, (*place, index)) for index, inner in enumerate(value))
    else:
        yield value, place


def _without(schema: Any, path: _Path, dropped: frozenset[_Path]) -> Any:
    """Return a schema without the keywords at these places.

    An object that is described in part must not be closed to what is left out.
    """
    if not isinstance(schema, dict):
        return schema
    own = {}
    for name, value in schema.items():
        place = (*path, name)
        if place not in dropped:
            own[name] = _kept(name, value, place, dropped)
    lost = [name for name in _DESCRIPTIONS if _has_lost(name, schema, path, dropped)]
    if lost and own:
        own.pop("unevaluatedProperties", None)
        own["additionalProperties"] = True
    if (*path, "prefixItems") in dropped or ("prefixItems" in own and (*path, "items") in dropped):
        own.pop("unevaluatedItems", None)
        own["items"] = True
    return own


def _kept(name: str, value: Any, place: _Path, dropped: frozenset[_Path]) -> Any:
    if name in _ATOMS:
        return value
    if name in SCHEMA_MAPS and isinstance(value, dict):
        return {
            key: _without(inner, (*place, key), dropped)
            for key, inner in value.items()
            if (*place, key) not in dropped
        }
    if isinstance(value, list):
        return [_without(inner, (*place, index), dropped) for index, inner in enumerate(value)]
    return _without(value, place, dropped)


def _has_lost(name: str, schema: Mapping[str, Any], path: _Path, dropped: frozenset[_Path]) -> bool:
    value = schema.get(name)
    if name not in schema:
        return False
    is_map = name == "patternProperties" and isinstance(value, dict)
    return (*path, name) in dropped or (
        is_map and any((*path, name, key) in dropped for key in value or ())
    )
