"""Parts of a request that belong to another server's own tools: they are left out and named.

Clients send them whichever server answers: `web_search` among the tools, a search's results in an
earlier answer. An answer without them is a valid answer, and says what was left out.
"""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from pydantic import Discriminator, JsonValue, WithJsonSchema

from outrider.gateway.contract.errors.tree import BadRequestError

FOREIGN: Final = "foreign"
"""Tag of a foreign part in a union of kinds."""
Foreign = dict[str, JsonValue]


def other_than(*kinds: str) -> WithJsonSchema:
    """Return the schema of a part whose `type` is none of these."""
    kind = {"type": "string", "not": {"enum": list(kinds)}}
    return WithJsonSchema({"type": "object", "properties": {"type": kind}, "required": ["type"]})


def by_kind(*kinds: str, absent: str | None = None) -> Discriminator:
    """Return what tells these kinds, and foreign ones, by `type`; `absent`: the kind without it."""

    def kind_of(value: Any) -> str | None:
        kind = value.get("type", absent) if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return absent if isinstance(value, dict) and kind is None else None
        return kind if kind in kinds else FOREIGN

    return Discriminator(
        kind_of,
        custom_error_type="unsupported_kind",
        custom_error_message=f"a `type` is required, such as {kinds[0]!r}",
    )


def refuse_foreign(left_out: Mapping[str, str]) -> NoReturn:
    """Raise BadRequestError for the first path that was left out; the values are its types."""
    path, kind = next(iter(left_out.items()))
    raise BadRequestError(
        f'{path}: {kind!r} is not supported; unknown_fields = "ignore" leaves it out.', param=path
    )
