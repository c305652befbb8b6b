"""Parts of a request that belong to another server's own tools: they are left out and named.

Clients send them whichever server answers: `web_search` among the tools, a search's results in an
earlier answer. An answer without them is a valid answer, and says what was left out. Like unknown
fields they are not in the OpenAPI document.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, NoReturn

from pydantic import Discriminator, JsonValue, Tag, WithJsonSchema

from outrider.gateway.contract.errors.tree import BadRequestError

_FOREIGN: Final = "foreign"
Foreign = Annotated[dict[str, JsonValue], WithJsonSchema(None), Tag(_FOREIGN)]
"""A part of a kind that is none of ours, in a union that `by_kind` tells apart."""


def by_kind(*kinds: str, absent: str | None = None) -> Discriminator:
    """Return what tells these kinds, and foreign ones, by `type`; `absent`: the kind without it."""

    def tag_of(value: Any) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get("type")
        return absent if kind is None else kind_among(kinds, kind)

    return Discriminator(
        tag_of,
        custom_error_type="unsupported_kind",
        custom_error_message=f"a `type` is required, such as {kinds[0]!r}",
    )


def kind_among(kinds: Collection[str], kind: object) -> str | None:
    """Return the tag of a part of this kind; None for what is no kind."""
    if not isinstance(kind, str):
        return None
    return kind if kind in kinds else _FOREIGN


def refuse_foreign(left_out: Mapping[str, str]) -> NoReturn:
    """Raise BadRequestError for the first path that was left out; the values are its types."""
    path, kind = next(iter(left_out.items()))
    raise BadRequestError(
        f'{path}: {kind!r} is not supported; unknown_fields = "ignore" leaves it out.', param=path
    )
