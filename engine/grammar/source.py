"""A client's grammar as text that xgrammar compiles; runs in the compiling process.

Everything that Python does with a client's text is here, away from the process that runs the
steps: what comes out goes through xgrammar's C++ code only, which releases the interpreter lock.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from outrider.engine.grammar.grammar import InvalidGrammarError
from outrider.engine.grammar.json_lengths import Lengths
from outrider.engine.grammar.json_pattern import exact, json_string_rules, length_rules
from outrider.engine.grammar.json_scalars import StringRule
from outrider.engine.grammar.json_schema import marker, prepare_schema
from outrider.engine.request import GrammarKind

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE_CHARS: Final = 8
"""Between two tokens of a JSON answer. Without a bound a weak model writes spaces to the end."""

_MAX_REASON_CHARS: Final = 1000
# xgrammar's messages begin with a time stamp and the place in its source.
_ORIGIN: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """A grammar as xgrammar takes it. `schema`: a prepared JSON schema; `tag`: a structural tag."""

    form: Literal["schema", "regex", "ebnf", "tag"]
    text: str


def prepare_source(kind: GrammarKind, text: str) -> GrammarSource:
    """Check a grammar (see `GrammarSpec`) and bring it into a form that xgrammar enforces entirely.

    Raises InvalidGrammarError where there is none.
    """
    patterns: list[StringRule] = []
    match kind:
        case "json":
            return GrammarSource(form="schema", text='{"type": "object"}')
        case "json_schema":
            schema = json.dumps(prepare_schema(_load(text), patterns))
            return _with_patterns(GrammarSource(form="schema", text=schema), patterns)
        case "regex":
            return GrammarSource(form="regex", text=text)
        case "choice":
            return GrammarSource(form="ebnf", text=_choice_grammar(_load(text)))
        case "ebnf":
            return GrammarSource(form="ebnf", text=text)
        case "structural_tag":
            tag = json.dumps(_prepare_tag(_load(text), patterns))
            return _with_patterns(GrammarSource(form="tag", text=tag), patterns)


def compile_source(
    compiler: "xgrammar.GrammarCompiler", source: GrammarSource
) -> "xgrammar.CompiledGrammar":
    """Compile for the compiler's vocabulary; the interpreter lock is free meanwhile."""
    if source.form == "tag":
        # Names of special tokens are looked up in the vocabulary, so not without it.
        return compiler.compile_structural_tag(source.text)
    return compiler.compile_grammar(_grammar(source))


def reason(error: BaseException) -> str:
    """xgrammar's own words, without the place in its source and without most of a long text."""
    return _ORIGIN.sub("", str(error)).strip()[:_MAX_REASON_CHARS] or "it cannot be compiled"


def _grammar(source: GrammarSource) -> "xgrammar.Grammar":
    from xgrammar import Grammar

    match source.form:
        case "schema":
            return Grammar.from_json_schema(
                source.text, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE_CHARS
            )
        case "regex":
            return Grammar.from_regex(source.text)
        case "ebnf":
            return Grammar.from_ebnf(source.text)
        case "tag":
            return Grammar.from_structural_tag(source.text)


def _with_patterns(source: GrammarSource, patterns: Sequence[StringRule]) -> GrammarSource:
    """The grammar of a prepared schema, with rules of its own for each pattern."""
    if not patterns:
        return source
    rules = exact(str(_grammar(source)))
    for number, pattern in enumerate(patterns):
        name = f"outrider_pattern_{number}"
        rules = rules.replace(f'Regex("{marker(number)}", json_string=true)', name)
        if isinstance(pattern, Lengths):
            rules += length_rules(pattern.shortest, pattern.longest, name)
        else:
            grammar = _grammar(GrammarSource(form="regex", text=pattern))
            rules += json_string_rules(str(grammar), name)
    return GrammarSource(form="ebnf", text=rules)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidGrammarError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidGrammarError(f"it is not valid JSON: {error}") from error


def _choice_grammar(choices: Any) -> str:
    """A grammar in xgrammar's notation that allows exactly these texts."""
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammarError("choice must be a list with at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidGrammarError("each choice must be a text with at least one character")
    return "root ::= " + " | ".join(_literal(choice) for choice in dict.fromkeys(choices))


def _literal(text: str) -> str:
    """A string literal of xgrammar's notation, every character escaped."""
    return '"' + "".join(f"\\U{ord(char):08x}" for char in text) + '"'


def _prepare_tag(tag: Any, patterns: list[StringRule]) -> Any:
    """Check and complete the JSON schemas inside a structural tag, and bound their white space."""
    if isinstance(tag, list):
        return [_prepare_tag(item, patterns) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        schema = prepare_schema(tag["json_schema"], patterns)
        return {"max_whitespace_cnt": MAX_WHITESPACE_CHARS, **tag, "json_schema": schema}
    return {name: _prepare_tag(value, patterns) for name, value in tag.items()}
