"""One sentence about a body that pydantic refused, with the path of the field at fault."""

import json
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider.gateway.contract.errors.tree import BadRequestError

_MAX_QUOTED_CHARS: Final = 64
_MAX_COMPLAINTS: Final = 64


def bad_request(error: ValidationError, body: bytes) -> BadRequestError:
    """Return the most specific of pydantic's complaints, with its field's path in `body`."""
    # An object of thousands of unknown fields has as many complaints; the first ones say enough.
    details = error.errors(include_url=False, include_input=False)[:_MAX_COMPLAINTS]
    if details[0]["type"] == "json_invalid":
        return BadRequestError(
            f"The body is not valid JSON: {details[0]['ctx']['error']}.", code="invalid_json"
        )
    document = json.loads(body)
    paths = [_real_path(detail, document) for detail in details]
    # A union complains once a branch; the branch that got deepest is the one that was meant, and
    # of branches at one depth the first that takes a value of this type at all.
    index = min(
        range(len(paths)), key=lambda i: (-len(paths[i]), details[i]["type"].endswith("_type"))
    )
    param = ".".join(_shortened(str(part)) for part in paths[index]) or None
    reason = _explain(details[index], _value_at(document, paths[index]))
    reason = reason.removeprefix("Value error, ")  # pydantic's, before a validator's own words
    end = "" if reason.endswith(("?", ".")) else "."
    return BadRequestError(f"{param or 'body'}: {reason}{end}", param=param)


def _shortened(name: str) -> str:
    """Cut a field's name, which may be as long as the body."""
    return name if len(name) <= _MAX_QUOTED_CHARS else f"{name[:_MAX_QUOTED_CHARS]}..."


def _real_path(detail: ErrorDetails, document: Any) -> list[str | int]:
    """Return pydantic's location without the names of union branches: keys of the body only."""
    path: list[str | int] = []
    here: Any = document
    parts = list(detail["loc"])
    missing = parts.pop() if detail["type"] == "missing" else None
    for part in parts:
        try:
            here = here[part]
        except (IndexError, KeyError, TypeError):
            continue
        path.append(part)
    if detail["type"].startswith("union_tag"):
        path.append(detail["ctx"]["discriminator"].strip("'"))
    return path if missing is None else [*path, missing]


def _value_at(document: Any, path: list[str | int]) -> object:
    """Return the value at a path; None for a missing field."""
    for part in path[:-1]:
        document = document[part]
    try:
        return document[path[-1]] if path else document
    except (IndexError, KeyError, TypeError):
        return None


def _explain(detail: ErrorDetails, value: object) -> str:
    """Explain a complaint in a sentence without full stop."""
    match detail["type"]:
        case "extra_forbidden":
            return "this field is unknown or not supported"
        case "missing" | "union_tag_not_found":
            return "this field is required"
        case "union_tag_invalid":
            return f"{value!r} is not supported; available: {detail['ctx']['expected_tags']}"
        case "literal_error" if isinstance(value, str) and len(value) <= _MAX_QUOTED_CHARS:
            return f"{value!r} is not supported; available: {detail['ctx']['expected']}"
        case _:
            return detail["msg"]
