"""What /v1/responses refuses by name, and what only a tier elsewhere may take."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, JsonValue, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from gateway.schema.common import Harmless, Label

_STATELESS: Final = "responses are not stored here: send the whole conversation as `input`"


@dataclass(frozen=True, slots=True)
class Refused:
    """Annotation of a field of which only `values`, that change nothing, pass; `why` says more."""

    why: str
    values: tuple[JsonValue, ...] = (None,)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Refuse every other value, and say why."""
        harmless = Harmless(self.values)

        def check(value: JsonValue) -> JsonValue:
            if harmless.passes(value):
                return value
            raise PydanticCustomError("unsupported_value", "{why}", {"why": self.why})

        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        """List the values that pass, so that the OpenAPI document tells the truth."""
        return {"enum": list(self.values), "description": f"Refused: {self.why}."}


Stateless = Annotated[JsonValue, Refused(_STATELESS)]
NotStored = Annotated[JsonValue, Refused(_STATELESS, (None, False))]
NotInBackground = Annotated[
    JsonValue, Refused("responses are answered at once, not in the background", (None, False))
]
NotTruncated = Annotated[
    JsonValue,
    Refused("nothing is cut off a conversation that is too long", (None, "disabled")),
]
NotKnown = Annotated[JsonValue, Refused("this is not supported")]
ElsewhereOnly = Annotated[
    Label | None,
    WithJsonSchema(
        {"enum": [None], "description": "For tiers elsewhere; the local models refuse it."}
    ),
]
"""Sent on with the chat request, whose own schema refuses it for local models."""
