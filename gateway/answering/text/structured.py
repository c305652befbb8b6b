"""Turns `response_format`, `structured_outputs` and its aliases into the grammar of an answer.

Pure: the grammar itself is compiled by the engine, which may refuse it.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from outrider.engine.request import GrammarKind, GrammarSpec
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.grammar_parts import (
    MAX_READ_BYTES,
    GrammarPart,
    dumps,
    json_schema,
)
from outrider.gateway.answering.text.reasoning_formats import PLAIN, ReasoningDialect, Thinking
from outrider.gateway.answering.text.structural_tags import format_grammar, legacy_grammar
from outrider.gateway.answering.text.thinking import behind_reasoning
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.structured import (
    ALIASES,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredFields,
)

_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredPlan:
    """A grammar for the whole answer. `param`: the field of the request that asks for it."""

    kind: GrammarKind
    text: str
    param: str
    place: str = ""
    """The field that holds the schema, of which not all need be enforced; empty for others."""

    def grammar(
        self, thinking: Thinking = "none", reasoning: ReasoningDialect = PLAIN
    ) -> GrammarSpec:
        """Return the grammar to enforce. `thinking`: a block that comes, or may come, before it.

        Raises BadRequestError for a text over the engine's limit.
        """
        try:
            if not self.place or len(self.text) > MAX_READ_BYTES:  # before it is parsed
                plain = GrammarSpec(kind=self.kind, text=self.text)
                if thinking == "none":
                    return plain
            whole = behind_reasoning(self._format(), thinking, reasoning)
            return GrammarSpec(kind="parts", text=dumps(whole))
        except ValueError as error:
            raise BadRequestError(f"{self.param}: {error}.", param=self.param) from error

    def answer_schema(self) -> AnswerSchema | None:
        """Return the schema of the answer; None where it is no JSON, and the grammar alone says."""
        if self.kind not in {"json", "json_schema"}:
            return None
        return AnswerSchema(content=self.text or json.dumps(_ANY_OBJECT), place=self.place)

    def _format(self) -> GrammarPart:
        """The grammar as a part of a larger one."""
        match self.kind:
            case "json":
                return json_schema(_ANY_OBJECT, self.place, is_lenient=False)
            case "json_schema":
                return json_schema(self._parsed(), self.place, is_lenient=bool(self.place))
            case "regex":
                return {"type": "regex", "pattern": self.text}
            case "choice":
                return {"type": "choice", "values": self._parsed()}
            case "parts":
                part: GrammarPart = self._parsed()
                return part
            case _:
                return {"type": "grammar", "grammar": self.text}

    def _parsed(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"{self.param}: not valid JSON: {error}.", param=self.param
            ) from error


def plan_structured(request: StructuredFields) -> StructuredPlan | None:
    """Plan the fields that give the answer a form; None for free text.

    Raises BadRequestError for two that differ.
    """
    fields = request.form_fields
    plans = [_plan_of(request, name) for name in fields]
    if not plans:
        return None
    meanings = {(plan.kind, plan.text, plan.place) for plan in plans}
    if len(meanings) > 1:
        raise BadRequestError(
            f"{fields[1]}: it excludes {fields[0]}; give one of the two.", param=fields[1]
        )
    return plans[0]


def _plan_of(request: StructuredFields, name: str) -> StructuredPlan:
    if name == "response_format" and request.response_format is not None:
        return _of_response_format(request.response_format)
    if name == "structured_outputs" and request.structured_outputs is not None:
        outputs = request.structured_outputs
        key = next(iter(outputs.model_fields_set))
        return _of_output(key.rstrip("_"), getattr(outputs, key), name)
    return _of_output(ALIASES[name], getattr(request, name), name)


def _of_response_format(asked: ResponseFormat) -> StructuredPlan:
    param = "response_format"
    place, schema, is_strict = f"{param}.schema", None, False
    if isinstance(asked, StructuralTagFormat):
        return StructuredPlan(kind="parts", text=_dumps(_tags(asked)), param=param, place=param)
    if isinstance(asked, JsonSchemaFormat) and asked.json_schema is not None:
        place = f"{param}.json_schema.schema"
        schema, is_strict = asked.json_schema.schema_, bool(asked.json_schema.strict)
    elif isinstance(asked, JsonObjectFormat | JsonSchemaFormat):
        schema = asked.schema_
    if schema is None:  # OpenAI's default: any object
        return StructuredPlan(kind="json", text="", param=param)
    return StructuredPlan(
        kind="json_schema", text=_dumps(schema), param=param, place="" if is_strict else place
    )


def _tags(asked: StructuralTagFormat) -> GrammarPart:
    if asked.format is not None:
        return format_grammar(asked.format, "response_format.format")
    return legacy_grammar(asked.structures or (), asked.triggers or (), "response_format")


def _of_output(name: str, value: Any, param: str) -> StructuredPlan:
    match name:
        case "regex" | "grammar":
            kind: GrammarKind = "regex" if name == "regex" else "grammar"
            return StructuredPlan(kind=kind, text=value, param=param)
        case "choice":
            return StructuredPlan(kind="choice", text=_dumps(value), param=param)
        case _:
            text = value if isinstance(value, str) else _dumps(value)
            return StructuredPlan(kind="json_schema", text=text, param=param)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
