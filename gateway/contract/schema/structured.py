"""`response_format`, `structured_outputs` and its aliases: what an answer must conform to."""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from outrider.engine.request import MAX_GRAMMAR_BYTES
from outrider.gateway.contract.schema.common import GenerationFields, Label, ListOf, RequestModel

MAX_CHOICE_TEXTS = 1024
MAX_REGEX_CHARS = 8192
MAX_TAGS = 1024

JsonSchema = dict[str, JsonValue]


class TextFormat(RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object; with `schema`, as `json_schema` (llama.cpp, Together, Fireworks)."""

    type: Literal["json_object"]
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None


class NamedSchema(RequestModel):
    """A JSON schema. With `strict` one of which not all can be enforced is refused."""

    name: Annotated[Label | None, Field(description="It has no effect.")] = None
    description: Annotated[str | None, Field(max_length=4096)] = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


def _document_one_schema(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `JsonSchemaFormat` checks."""
    schema["oneOf"] = [
        {"required": [name], "properties": {name: {"type": "object"}}}
        for name in ("json_schema", "schema")
    ]


class JsonSchemaFormat(RequestModel):
    """JSON that conforms to a schema. `schema` in place of `json_schema` is llama.cpp's."""

    model_config = ConfigDict(json_schema_extra=_document_one_schema)

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_exactly_one(self) -> "JsonSchemaFormat":
        if (self.json_schema is None) == (self.schema_ is None):
            raise PydanticCustomError("json_schema", "give one of json_schema and schema")
        return self


class TaggedSchema(RequestModel):
    """Text that begins with `begin` goes on with JSON under `schema`, and `end`."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[JsonSchema | bool | None, Field(alias="schema")] = None
    end: str = ""


class StructuralTagFormat(RequestModel):
    """Free text with parts that have a form: vLLM's and SGLang's legacy fields, or a `format`.

    `structures` begin with one of `triggers`. `format` is xgrammar's.
    """

    type: Literal["structural_tag"]
    structures: Annotated[ListOf[TaggedSchema] | None, Field(min_length=1, max_length=MAX_TAGS)] = (
        None
    )
    triggers: Annotated[
        ListOf[Annotated[str, Field(min_length=1)]] | None, Field(min_length=1, max_length=MAX_TAGS)
    ] = None
    format: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_one_shape(self) -> "StructuralTagFormat":
        legacy = self.structures is not None, self.triggers is not None
        if legacy != (self.format is None,) * 2:
            raise PydanticCustomError(
                "structural_tag", "give structures and triggers, or format alone"
            )
        return self


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]
ChoiceText = Annotated[str, Field(min_length=1)]
ChoiceTexts = Annotated[ListOf[ChoiceText], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)]
RegexText = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


def _document_one_of(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `_has_exactly_one` checks."""
    schema["minProperties"] = schema["maxProperties"] = 1
    for field in schema["properties"].values():
        field.pop("default", None)
        branches = [branch for branch in field["anyOf"] if branch != {"type": "null"}]
        field["anyOf"] = branches


class StructuredOutputs(RequestModel):
    """vLLM's names. Exactly one of them: what the whole answer matches."""

    model_config = ConfigDict(json_schema_extra=_document_one_of)

    regex: RegexText | None = None
    choice: ChoiceTexts | None = None
    grammar: Annotated[GrammarText | None, Field(description="In GBNF or Lark.")] = None
    json_: Annotated[JsonSchema | str | None, Field(alias="json", description="A JSON schema.")] = (
        None
    )

    @model_validator(mode="after")
    def _has_exactly_one(self) -> "StructuredOutputs":
        given = [getattr(self, name) for name in self.model_fields_set]
        if len(given) != 1 or given[0] is None:
            raise PydanticCustomError(
                "structured_outputs", "give exactly one of regex, choice, grammar and json"
            )
        return self


ALIASES: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Other servers' fields at the top of a request, and the fields of `structured_outputs`."""


FORM_FIELDS: Final = frozenset({"response_format", "structured_outputs", *ALIASES})
"""The fields that give an answer its form."""


def _alias(server: str, name: str) -> Any:
    return Field(description=f"{server}'s name of `structured_outputs.{name}`.")


class StructuredFields(GenerationFields):
    """The fields that give an answer its form: the same in chat and completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[JsonSchema | str | None, _alias("vLLM", "json")] = None
    guided_regex: Annotated[RegexText | None, _alias("vLLM", "regex")] = None
    guided_choice: Annotated[ChoiceTexts | None, _alias("vLLM", "choice")] = None
    guided_grammar: Annotated[GrammarText | None, _alias("vLLM", "grammar")] = None
    regex: Annotated[RegexText | None, _alias("SGLang", "regex")] = None
    ebnf: Annotated[GrammarText | None, _alias("SGLang", "grammar")] = None
    json_schema: Annotated[JsonSchema | str | None, _alias("SGLang", "json")] = None
    grammar: Annotated[GrammarText | None, _alias("llama.cpp", "grammar")] = None

    @property
    def form_fields(self) -> tuple[str, ...]:
        """The fields that give the answer a form."""
        names = ("structured_outputs", *ALIASES)
        given = tuple(name for name in names if getattr(self, name) is not None)
        is_free = isinstance(self.response_format, TextFormat | None)
        return given if is_free else ("response_format", *given)
