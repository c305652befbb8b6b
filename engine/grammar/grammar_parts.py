"""Parts of an answer that a grammar is made of, as JSON, and their text in llguidance's notation.

A part is an object with a `type`:

- const: `value`, a text. token: `token`, the id of a special token, which no text spells.
- regex: `pattern`. choice: one of `values`. grammar: `grammar`, a client's own (GBNF or Lark).
- json_schema: `json_schema`. `lenient` leaves out what cannot be enforced, and says so with the
  `place` of the schema in the request; `left_out` was left out before.
- note: nothing; `left_out` as above.
- text: any text, then `suffix`. `max_chars` of it; not beginning with `not_before`.
- text_until: any text up to the first `end`, which belongs to it. `max_chars`, `not_before` as
  above; the text holds no `excludes`.
- sequence and or: `elements`. optional and star: `content`.

The notation is Lark's with additions (github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
Names in upper case are terminals: each is one regular expression to the lexer, which takes the
longest text it can, and the shortest where a rule is lazy.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.json_pattern import javascript
from outrider.engine.grammar.json_schema import Schema, prepare_schema
from outrider.engine.grammar.leaving_out import LeavingOut

# Without it only one way to split a text into tokens is allowed, and masks would change with it.
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """A grammar as llguidance takes it."""

    text: str
    left_out: tuple[str, ...] = ()
    """Keywords of lenient schemas that it leaves out, as `place#pointer`."""


def source_of(part: Any, leaving_out: LeavingOut) -> GrammarSource:
    """Return the grammar of an answer that is this part, as llguidance takes it.

    `leaving_out`: prepares lenient schemas. Raises InvalidGrammarError for what is no part, and for
    another schema that cannot be enforced.
    """
    rules = _Rules(leaving_out)
    try:
        start = rules.expression(part)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidGrammarError(f"it is no grammar: {error!r}") from error
    own = {"name": "answer", "lark_grammar": f"{_OPTIONS}start: {start}\n{''.join(rules.lines)}"}
    text = json.dumps({"grammars": [own, *rules.others]})
    return GrammarSource(text=text, left_out=tuple(rules.left_out))


def schema_source(schema: Schema | bool) -> str:
    """Return the grammar of JSON under a schema that `prepare_schema` has returned."""
    lark = f"{_OPTIONS}start: r0\nr0: %json {json.dumps(schema)}\n"
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}]})


class _Rules:
    """Collects the rules that expressions refer to."""

    def __init__(self, leaving_out: LeavingOut) -> None:
        self.lines: list[str] = []
        self.others: list[dict[str, str]] = []
        self.left_out: list[str] = []
        self._leaving_out = leaving_out

    def expression(self, part: Any) -> str:
        """An expression for a part, with what it needs among the rules."""
        kind: str = part["type"]
        build: Callable[[Any], str] | None = getattr(self, f"_{kind}", None)
        if build is None:
            raise InvalidGrammarError(f"{kind!r} is no type of a grammar's part")
        return build(part)

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}\n")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}\n")
        return name

    def _const(self, part: Any) -> str:
        return _literal(part["value"])

    def _token(self, part: Any) -> str:
        return f"<[{int(part['token'])}]>"

    def _regex(self, part: Any) -> str:
        return self._terminal(f"/{javascript(part['pattern'], is_quoted=False)}/")

    def _choice(self, part: Any) -> str:
        return self._terminal(" | ".join(map(_literal, dict.fromkeys(part["values"]))))

    def _json_schema(self, part: Any) -> str:
        if not part.get("lenient"):
            return self._rule(f"%json {json.dumps(prepare_schema(part['json_schema']))}")
        schema, pointers = self._leaving_out.prepare(part["json_schema"])
        self._note(part)
        self.left_out += [f"{part.get('place', '')}#{pointer}" for pointer in pointers]
        return self._rule(f"%json {json.dumps(schema)}")

    def _note(self, part: Any) -> str:
        self.left_out += [str(name) for name in part.get("left_out", ())]
        return '""'

    def _grammar(self, part: Any) -> str:
        try:
            text = str(any_to_lark(part["grammar"]))
        except Exception as error:  # the converter's own are of several kinds
            raise InvalidGrammarError(f"it cannot be read: {error}") from error
        self.others = [{"name": "client", "lark_grammar": text}]  # an answer has one of these
        return "@client"

    def _text(self, part: Any) -> str:
        suffix = _literal(part["suffix"]) if part.get("suffix") else ""
        return self._terminal(f"{_characters(part)} {suffix}")

    def _text_until(self, part: Any) -> str:
        body = self._terminal(_characters(part))
        return self._rule(f"{body} {_literal(part['end'])}", is_lazy=True)

    def _sequence(self, part: Any) -> str:
        return " ".join(map(self.expression, part["elements"])) or '""'

    def _or(self, part: Any) -> str:
        return self._rule(" | ".join(map(self.expression, part["elements"])))

    def _optional(self, part: Any) -> str:
        return f"({self.expression(part['content'])})?"

    def _star(self, part: Any) -> str:
        return f"({self.expression(part['content'])})*"


def _characters(part: Any) -> str:
    """A terminal's body for any characters, but for what the part excludes."""
    most = part.get("max_chars")
    body = "/(?s:.*)/" if most is None else f"/(?s:.{{0,{int(most)}}})/"
    if start := part.get("not_before"):
        body += f" & ~/{_escaped(start)}(?s:.*)/"
    if inner := part.get("excludes"):
        body += f" & ~/(?s:.*){_escaped(inner)}(?s:.*)/"
    return f"({body})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
