"""Is an answer right? What a program can check, by kind; a judge model is in
gateway/tools/learning/collect/judge.py.

- exact: the whole answer, white space around it left out;
- regex: `expected` is searched for in the answer's last line;
- json: the last line (or the whole answer), after an optional `Answer:`, is the expected value;
- tool_call: the answer makes exactly the expected call, written the hermes way;
- json_schema: the answer is JSON that conforms to a schema;
- judge: another model decides.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from outrider.gateway.answering.text.tool_formats import HERMES
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading

AnswerCheckKind = Literal["exact", "regex", "json", "tool_call", "json_schema", "judge"]
CHECK_KINDS: Final[tuple[AnswerCheckKind, ...]] = get_args(AnswerCheckKind)

Predicate = Callable[[str], bool]

# A pattern can take exponential time in its own length and in the text's; both are bounded.
_MAX_PATTERN_BYTES: Final = 1024
_MAX_LINE_CHARS: Final = 4096
_ANSWER_PREFIX: Final = "Answer:"
_BROKEN_JSON: Final = (ValueError, RecursionError)


class UncheckableError(ValueError):
    """Raised for an expected answer that cannot be checked; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """Check of an answer's correctness. `is_right` is None if a judge decides.

    `expected` is the data's answer as text; None if they have none.
    """

    kind: AnswerCheckKind
    expected: str | None
    is_right: Predicate | None


def make_check(kind: str, expected: object, schema: object = None) -> AnswerCheck:
    """The check of a kind. `expected`: text or a JSON value; `schema`: of json_schema, if apart.

    Raises UncheckableError for an unknown kind, and where `expected` is missing or cannot be used.
    """
    if kind not in CHECK_KINDS:
        raise UncheckableError(
            f"check kind {kind!r} is unknown; available: {', '.join(CHECK_KINDS)}"
        )
    if kind == "json_schema" and schema is not None:
        expected = schema
    text = expected if isinstance(expected, str | None) else json.dumps(expected)
    if kind == "judge":
        return AnswerCheck(kind=kind, expected=text, is_right=None)
    if text is None:
        raise UncheckableError(f"expected is missing: {kind} compares the answer with it")
    return AnswerCheck(kind=kind, expected=text, is_right=_MAKERS[kind](text))


def last_line(answer: str) -> str:
    """The last line that is not empty, without white space around it; empty if there is none."""
    return answer.strip().rpartition("\n")[2].strip()


def _exact(expected: str) -> Predicate:
    wanted = expected.strip()
    return lambda answer: answer.strip() == wanted


def _regex(expected: str) -> Predicate:
    size_bytes = len(expected.encode())
    if size_bytes > _MAX_PATTERN_BYTES:
        raise UncheckableError(
            f"expected is a pattern of {size_bytes} bytes, at most {_MAX_PATTERN_BYTES} are taken"
        )
    try:
        pattern = re.compile(expected)
    except (re.error, RecursionError, OverflowError) as error:
        raise UncheckableError(f"expected is not a regular expression: {error}") from error

    def is_right(answer: str) -> bool:
        line = last_line(answer)
        return len(line) <= _MAX_LINE_CHARS and pattern.search(line) is not None

    return is_right


def _json(expected: str) -> Predicate:
    wanted = _parsed(expected)

    def is_right(answer: str) -> bool:
        texts = dict.fromkeys((last_line(answer), answer.strip()))
        return any(_says(text.removeprefix(_ANSWER_PREFIX), wanted) for text in texts)

    return is_right


def _tool_call(expected: str) -> Predicate:
    wanted = _parsed(expected)
    is_call = isinstance(wanted, dict) and isinstance(wanted.get("name"), str)
    if not is_call or not isinstance(wanted.get("arguments"), dict):
        raise UncheckableError('expected is not a call such as {"name": "f", "arguments": {}}')

    def is_right(answer: str) -> bool:
        parser = ToolParser(ToolReading(format=HERMES))
        pieces = [*parser.push(answer), *parser.flush()]
        names = [piece.text for piece in pieces if piece.kind == "call"]
        arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
        return names == [wanted["name"]] and _says(arguments, wanted["arguments"])

    return is_right


def _json_schema(expected: str) -> Predicate:
    if importlib.util.find_spec("jsonschema_rs") is None:
        raise UncheckableError(
            "json_schema checks need jsonschema-rs, which is not installed: "
            "pip install jsonschema-rs"
        )
    import jsonschema_rs

    schema = _parsed(expected)
    try:
        validator = jsonschema_rs.validator_for(schema)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UncheckableError(f"expected is not a JSON schema: {reason}") from error

    def is_right(answer: str) -> bool:
        try:
            value = json.loads(answer)
        except _BROKEN_JSON:
            return False
        return bool(validator.is_valid(value))

    return is_right


_MAKERS: Final[Mapping[str, Callable[[str], Predicate]]] = {
    "exact": _exact,
    "regex": _regex,
    "json": _json,
    "tool_call": _tool_call,
    "json_schema": _json_schema,
}


def _parsed(expected: str) -> Any:
    try:
        return json.loads(expected)
    except _BROKEN_JSON as error:
        raise UncheckableError(f"expected is not JSON: {error}") from error


def _says(text: str, wanted: Any) -> bool:
    try:
        return _is_same(json.loads(text), wanted)
    except _BROKEN_JSON:
        return False


def _is_same(left: Any, right: Any) -> bool:
    """JSON's equality: 1 and 1.0 are one number, but 1 is not true as it is to Python."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return bool(left == right)
