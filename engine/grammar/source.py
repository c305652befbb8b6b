"""A client's grammar as llguidance reads it; runs in the compiling process.

Everything that Python does with a client's text is here, away from the process that runs the steps.
"""

import json
from typing import Any

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.grammar_parts import GrammarSource, source_of
from outrider.engine.grammar.leaving_out import LeavingOut
from outrider.engine.request import GrammarKind


def prepare_source(kind: GrammarKind, text: str, leaving_out: LeavingOut) -> GrammarSource:
    """Check a grammar (see `GrammarSpec`) and write it as llguidance takes it.

    `leaving_out`: prepares its lenient schemas. Raises InvalidGrammarError where an answer under it
    could break it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammarError("it holds half surrogates, which no text does") from None
    match kind:
        case "json":
            return source_of(
                {"type": "json_schema", "json_schema": {"type": "object"}}, leaving_out
            )
        case "json_schema":
            return source_of({"type": "json_schema", "json_schema": _load(text)}, leaving_out)
        case "regex":
            return source_of({"type": "regex", "pattern": text}, leaving_out)
        case "choice":
            return source_of({"type": "choice", "values": _choices(_load(text))}, leaving_out)
        case "grammar":
            return source_of({"type": "grammar", "grammar": text}, leaving_out)
        case "parts":
            return source_of(_load(text), leaving_out)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidGrammarError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidGrammarError(f"it is not valid JSON: {error}") from error


def _choices(choices: Any) -> list[str]:
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammarError("choice must be a list with at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidGrammarError("each choice must be a text with at least one character")
    return choices
