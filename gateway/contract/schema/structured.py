"""`response_format` and `structured_outputs`: what an answer must conform to."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from outrider.engine.request import MAX_GRAMMAR_BYTES
from outrider.gateway.contract.schema.common import Label, ListOf, RequestModel

MAX_CHOICE_TEXTS = 1024
MAX_REGEX_CHARS = 8192


class TextFormat(RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestModel):
    """A JSON schema. It is enforced, whatever `strict` says."""

    name: Label
    description: Annotated[str | None, Field(max_length=4096)] = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
ChoiceText = Annotated[str, Field(min_length=1)]


def _document_one_of(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `_has_exactly_one` checks."""
    schema["minProperties"] = schema["maxProperties"] = 1
    for field in schema["properties"].values():
        field.pop("default", None)
        branches = [branch for branch in field["anyOf"] if branch != {"type": "null"}]
        field["anyOf"] = branches


ChoiceTexts = Annotated[ListOf[ChoiceText], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)]


class StructuredOutputs(RequestModel):
    """vLLM's names. Exactly one of them: what the whole answer matches."""

    model_config = ConfigDict(json_schema_extra=_document_one_of)

    regex: Annotated[str | None, Field(min_length=1, max_length=MAX_REGEX_CHARS)] = None
    choice: (
        Annotated[ListOf[ChoiceText], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None
    ) = None
    grammar: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_GRAMMAR_BYTES, description="In GBNF or Lark."),
    ] = None
    json_: Annotated[
        dict[str, JsonValue] | str | None, Field(alias="json", description="A JSON schema.")
    ] = None

    @model_validator(mode="after")
    def _has_exactly_one(self) -> "StructuredOutputs":
        given = [getattr(self, name) for name in self.model_fields_set]
        if len(given) != 1 or given[0] is None:
            raise PydanticCustomError(
                "structured_outputs", "give exactly one of regex, choice, grammar and json"
            )
        return self
