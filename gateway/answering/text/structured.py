"""Turns `response_format` and `structured_outputs` into the grammar of an answer.

Pure: the grammar itself is compiled by the engine, which may refuse it.
"""

import json
from dataclasses import dataclass
from typing import Any

from outrider.engine.request import GrammarKind, GrammarSpec
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.reasoning_formats import PLAIN, ReasoningDialect, Thinking
from outrider.gateway.answering.text.thinking import behind_reasoning
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredPlan:
    """A grammar for the whole answer. `param`: the field of the request that asks for it."""

    kind: GrammarKind
    text: str
    param: str

    def grammar(
        self, thinking: Thinking = "none", reasoning: ReasoningDialect = PLAIN
    ) -> GrammarSpec:
        """Return the grammar to enforce. `thinking`: a block that comes, or may come, before it.

        Raises BadRequestError for a text over the engine's limit.
        """
        try:
            plain = GrammarSpec(kind=self.kind, text=self.text)  # its size, before it is parsed
            if thinking == "none":
                return plain
            whole = behind_reasoning(self._format(), thinking, reasoning)
            return GrammarSpec(kind="parts", text=_dumps(whole))
        except ValueError as error:
            raise BadRequestError(f"{self.param}: {error}.", param=self.param) from error

    def answer_schema(self) -> AnswerSchema | None:
        """Return the schema of the answer; None where it is no JSON, and the grammar alone says."""
        if self.kind not in {"json", "json_schema"}:
            return None
        return AnswerSchema(content=self.text or '{"type": "object"}')

    def _format(self) -> dict[str, Any]:
        """The grammar as a part of a larger one."""
        match self.kind:
            case "json":
                return {"type": "json_schema", "json_schema": {"type": "object"}}
            case "json_schema":
                return {"type": "json_schema", "json_schema": self._parsed()}
            case "regex":
                return {"type": "regex", "pattern": self.text}
            case "choice":
                return {"type": "choice", "values": self._parsed()}
            case _:
                return {"type": "grammar", "grammar": self.text}

    def _parsed(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"{self.param}: not valid JSON: {error}.", param=self.param
            ) from error


def plan_structured(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredPlan | None:
    """Plan the two fields; None for free text. Raises BadRequestError for both at once."""
    plan = _of_response_format(response_format)
    if structured_outputs is None:
        return plan
    if plan is not None:
        raise BadRequestError(
            "structured_outputs: it excludes response_format; give one of the two.",
            param="structured_outputs",
        )
    return _of_structured_outputs(structured_outputs)


def _of_response_format(response_format: ResponseFormat | None) -> StructuredPlan | None:
    param = "response_format"
    if isinstance(response_format, JsonObjectFormat):
        return StructuredPlan(kind="json", text="", param=param)
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        if schema is None:  # OpenAI's default: any object
            return StructuredPlan(kind="json", text="", param=param)
        return StructuredPlan(kind="json_schema", text=_dumps(schema), param=param)
    return None


def _of_structured_outputs(outputs: StructuredOutputs) -> StructuredPlan:
    param = "structured_outputs"
    if outputs.regex is not None:
        return StructuredPlan(kind="regex", text=outputs.regex, param=param)
    if outputs.choice is not None:
        return StructuredPlan(kind="choice", text=_dumps(outputs.choice), param=param)
    if outputs.grammar is not None:
        return StructuredPlan(kind="grammar", text=outputs.grammar, param=param)
    schema = outputs.json_
    text = schema if isinstance(schema, str) else _dumps(schema)
    return StructuredPlan(kind="json_schema", text=text, param=param)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
