"""Grammars of structural tags: free text with parts that begin with a mark and have a form.

Two notations are read: the legacy one of vLLM and SGLang (structures and triggers), and xgrammar's
(github.com/mlc-ai/xgrammar, "Structural Tag"). Marks are matched as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from outrider.gateway.answering.text.grammar_parts import (
    ANY_TEXT,
    GrammarPart,
    any_of,
    const,
    json_schema,
    optional,
    sequence,
    star,
)
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.structured import TaggedSchema

_MAX_DEPTH: Final = 32
_MAX_SHOWN_CHARS: Final = 64
_OPEN: Final = ("any_text", "triggered_tags")  # they end where what follows begins


def legacy_grammar(
    structures: Sequence[TaggedSchema], triggers: Sequence[str], path: str
) -> GrammarPart:
    """Return the grammar of free text in which each trigger begins one of the structures.

    Raises BadRequestError for a structure that begins with no trigger.
    """
    tags = [
        {
            "begin": tag.begin,
            "content": {
                "type": "json_schema",
                "json_schema": True if tag.schema_ is None else tag.schema_,
            },
            "end": tag.end,
        }
        for tag in structures
    ]
    return _Builder(f"{path}.structures", content="schema").triggered(
        {"tags": tags, "triggers": list(triggers)}, f"{path}.structures", None, 0
    )


def format_grammar(form: Mapping[str, Any], path: str) -> GrammarPart:
    """Return the grammar of an answer in xgrammar's notation. Raises BadRequestError."""
    return _Builder(path).build(form, path, None, 0)


class _Builder:
    """Builds parts of a format. `until`: a text that ends them, and belongs to them."""

    def __init__(self, root: str, content: str = "") -> None:
        self._root = root
        self._content = content
        self._has_grammar = False

    def build(self, form: Any, path: str, until: str | None, depth: int) -> GrammarPart:
        """Build a part, and the text that ends it."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if depth > _MAX_DEPTH:
            _refuse(path, f"it is nested more than {_MAX_DEPTH} levels deep")
        match kind:
            case "any_text":
                if form.get("excludes"):
                    _refuse(f"{path}.excludes", "it cannot be enforced")
                return ANY_TEXT if not until else {"type": "text_until", "end": until}
            case "triggered_tags":
                return self.triggered(form, path, until, depth)
            case "sequence":
                return self._sequence(_list(form, "elements", path), path, until, depth)
            case "or":
                elements = _list(form, "elements", path)
                if any(map(_is_open, elements)):
                    _refuse(path, "free text cannot be one of several forms")
                parts = [
                    self.build(element, f"{path}.elements.{index}", until, depth + 1)
                    for index, element in enumerate(elements)
                ]
                return any_of(parts)
            case "tag":
                begin = _begin(form, path)
                return sequence([const(begin), self._behind(form, path, until, depth)])
            case _:
                return _ended(self._closed(kind, form, path, depth), until)

    def _closed(self, kind: Any, form: Any, path: str, depth: int) -> GrammarPart:
        """Build a part that ends by itself."""
        match kind:
            case "const_string":
                return const(_text(form, "value", path))
            case "json_schema":
                return self._schema(form, path)
            case "regex":
                return {"type": "regex", "pattern": _text(form, "pattern", path)}
            case "grammar":
                if self._has_grammar:
                    _refuse(path, "a format has one grammar at most")
                self._has_grammar = True
                return {"type": "grammar", "grammar": _text(form, "grammar", path)}
            case "tags_with_separator":
                return self._separated(form, path, depth)
            case "optional" | "star" | "plus":
                return self._repeated(kind, form, path, depth)
            case _:
                shown = repr(kind)[:_MAX_SHOWN_CHARS]
                _refuse(f"{path}.type", f"a part of the type {shown} is not supported")

    def _schema(self, form: Any, path: str) -> GrammarPart:
        schema = form.get("json_schema")
        if form.get("style") not in (None, "json"):
            _refuse(f"{path}.style", "arguments are written as JSON only")
        if not isinstance(schema, Mapping | bool):
            _refuse(f"{path}.json_schema", "it must be a JSON schema")
        return json_schema(schema, f"{path}.{self._content or 'json_schema'}", is_lenient=True)

    def _repeated(self, kind: str, form: Any, path: str, depth: int) -> GrammarPart:
        inner = form.get("content")
        if _is_open(inner):
            _refuse(path, "free text cannot be optional or repeated")
        part = self.build(inner, f"{path}.content", None, depth + 1)
        repeated = optional(part) if kind == "optional" else star(part)
        return sequence([part, repeated]) if kind == "plus" else repeated

    def triggered(self, form: Any, path: str, until: str | None, depth: int) -> GrammarPart:
        """Build free text in which a trigger begins one of the tags that begin with it."""
        tags = _list(form, "tags", path)
        if form.get("excludes"):
            _refuse(f"{path}.excludes", "it cannot be enforced")
        places = [self._place(path, index) for index in range(len(tags))]
        begins = [_begin(tag, at) for tag, at in zip(tags, places, strict=True)]
        triggers = _triggers(_list(form, "triggers", path), path)
        whole = []
        rest: dict[str, list[GrammarPart]] = {trigger: [] for trigger in triggers}
        for tag, at, begin in zip(tags, places, begins, strict=True):
            behind = self._behind(tag, at, None, depth)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                _refuse(f"{at}.begin", "it begins with none of the triggers")
            rest[trigger].append(_joined(begin[len(trigger) :], behind))
            whole.append(sequence([const(begin), behind]))
        marked = [
            sequence([{"type": "text_until", "end": trigger}, any_of(parts)])
            for trigger, parts in rest.items()
            if parts
        ]
        text: GrammarPart = {"type": "text_until", "end": until} if until else ANY_TEXT
        if form.get("stop_after_first"):
            once = _ended(any_of(whole if form.get("at_least_one") else marked), until)
            return once if form.get("at_least_one") else any_of([once, text])
        parts = [star(any_of(marked)), text]
        return sequence([any_of(whole), *parts] if form.get("at_least_one") else parts)

    def _separated(self, form: Any, path: str, depth: int) -> GrammarPart:
        """Build tags with a separator between them."""
        tags = _list(form, "tags", path)
        built = []
        for index, tag in enumerate(tags):
            at = f"{path}.tags.{index}"
            built.append(sequence([const(_begin(tag, at)), self._behind(tag, at, None, depth)]))
        one = any_of(built)
        if not form.get("stop_after_first"):
            separator = _text(form, "separator", path, may_be_empty=True)
            one = sequence([one, star(_joined(separator, one))])
        return one if form.get("at_least_one") else optional(one)

    def _behind(self, tag: Any, path: str, until: str | None, depth: int) -> GrammarPart:
        """Build what follows the beginning of a tag, up to `until` behind its end."""
        end = _text(tag, "end", path, may_be_empty=True)
        at = path if self._content else f"{path}.content"
        content = tag.get("content")
        if _is_open(content) and not end and until is None and path != self._root:
            _refuse(f"{path}.end", "free text in a tag needs an end")
        return self.build(content, at, end + (until or ""), depth + 1)

    def _sequence(
        self, elements: list[Any], path: str, until: str | None, depth: int
    ) -> GrammarPart:
        """Build parts that follow one another; free text ends where the next one begins."""
        parts: list[GrammarPart] = []
        begun: str | None = None  # of the next element, which the free text before it has taken
        for index, element in enumerate(elements):
            at = f"{path}.elements.{index}"
            is_last = index + 1 == len(elements)
            behind = until if is_last else None
            following = None
            if _is_open(element) and not is_last:
                behind = following = _opening(elements[index + 1])
                if following is None:
                    why = "free text must stand last, or before a const_string or a tag"
                    _refuse(at, why)
            if begun is None:
                parts.append(self.build(element, at, behind, depth + 1))
            elif element.get("type") == "tag":
                parts.append(self._behind(element, at, behind, depth))
            elif behind:
                parts.append(const(behind))
            begun = following
        return sequence(parts) if parts else const("")

    def _place(self, path: str, index: int) -> str:
        return f"{path}.{index}" if self._content else f"{path}.tags.{index}"


def _is_open(form: Any) -> bool:
    """Return whether a part has free text at its end, which ends where something begins."""
    if not isinstance(form, Mapping):
        return False
    if form.get("type") == "triggered_tags":
        return not (form.get("stop_after_first") and form.get("at_least_one"))
    if form.get("type") == "sequence":
        elements = form.get("elements")
        return isinstance(elements, list) and bool(elements) and _is_open(elements[-1])
    return form.get("type") in _OPEN


def _opening(form: Any) -> str | None:
    """Return the text that a part begins with; None where that is no fixed text."""
    if not isinstance(form, Mapping):
        return None
    name = {"const_string": "value", "tag": "begin"}.get(str(form.get("type")), "")
    text = form.get(name)
    return text if isinstance(text, str) and text else None


def _triggers(listed: list[Any], path: str) -> list[str]:
    """Return the triggers, without those that begin with another one: it is met first."""
    for index, trigger in enumerate(listed):
        if not isinstance(trigger, str) or not trigger:
            _refuse(f"{path}.triggers.{index}", "it must be a text of at least one character")
    triggers = dict.fromkeys(listed)
    return [
        one
        for one in triggers
        if not any(one != other and one.startswith(other) for other in triggers)
    ]


def _ended(part: GrammarPart, until: str | None) -> GrammarPart:
    return sequence([part, const(until)]) if until else part


def _joined(text: str, part: GrammarPart) -> GrammarPart:
    return sequence([const(text), part]) if text else part


def _begin(tag: Any, path: str) -> str:
    return _text(tag, "begin", path)


def _text(form: Any, name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = form.get(name) if isinstance(form, Mapping) else None
    if isinstance(value, str) and (value or may_be_empty):
        return value
    _refuse(f"{path}.{name}", "it must be a text")


def _list(form: Any, name: str, path: str) -> list[Any]:
    value = form.get(name)
    if isinstance(value, list) and value:
        return value
    _refuse(f"{path}.{name}", "it must be a list with at least one item")


def _refuse(path: str, reason: str) -> NoReturn:
    raise BadRequestError(f"{path}: {reason}.", param=path)
