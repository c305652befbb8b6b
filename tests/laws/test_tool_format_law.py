"""In every family's format, calls conform to random schemas: the grammar and the reader agree.

The shipped pair answers; it knows none of the formats, so the grammar steers nearly every token.
"""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.chaos.fuzzed_schemas import random_schema
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.reasoning_formats import PLAIN
from outrider.gateway.answering.text.tool_formats import (
    COHERE,
    GLM45,
    HERMES,
    MISTRAL11,
    QWEN3_CODER,
    ToolDialect,
)
from outrider.gateway.answering.text.tool_parser import ToolParser
from outrider.gateway.answering.text.tools import ToolPlan
from outrider.gateway.contract.schema.tools import FunctionDefinition, Tool
from outrider.verifier.params import Tier
from tests.engines import (
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
)
from tests.grammars import shipped_compiler, text_of
from tests.sizes import repeats

COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}
FORMS = (HERMES, MISTRAL11, COHERE, QWEN3_CODER, GLM45)
NAMES = ("name", "age", "größe", "tags", "x-y")


def random_parameters(rng: random.Random) -> dict[str, Any]:
    """Return the schema of a function with one to three arguments."""
    names = rng.sample(NAMES, rng.randint(1, 3))
    properties: dict[str, Any] = {name: random_schema(rng, 1) for name in names}
    properties[rng.choice(names)] = rng.choice(
        [
            {"type": "string", "enum": ["left", "right"]},
            {"type": "string", "maxLength": 6},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {"type": ["string", "null"], "description": "perhaps"},
        ]
    )
    required = [name for name in names if rng.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def random_plan(rng: random.Random) -> ToolPlan:
    """Return a plan of one call of a random function."""
    function = FunctionDefinition(name="f", parameters=random_parameters(rng))
    tools = (Tool(type="function", function=function),)
    return ToolPlan(tools=tools, must_call=True, named=None, may_repeat=False)


@pytest.mark.slow
def test_calls_in_every_format_conform_to_random_schemas() -> None:
    rng = random.Random(5)
    prompts = heldout_prompts(8)
    plans: dict[str, tuple[ToolPlan, ToolDialect]] = {}
    requests: list[EngineRequest] = []
    for form in FORMS:
        dialect = ToolDialect(format=form, is_native=True, special_ids={})
        for number in range(repeats(6, 2)):
            plan, request_id = random_plan(rng), f"{form.name}-{number}"
            plans[request_id] = (plan, dialect)
            request = make_request(
                request_id, prompts[number], max_tokens=200, seed=number, temperature=number % 2
            )
            requests.append(replace(request, grammar=plan.grammar(dialect, PLAIN, "none")))
    num_whole = 0
    for start in range(0, len(requests), 10):
        engine = make_engine(shipped_pair(), grammars=COMPILERS)
        for request_id, answer in serve(engine, requests[start : start + 10]).items():
            plan, dialect = plans[request_id]
            if answer.finish_reason == "stop":
                text = text_of(answer.token_ids[:-1])
                check_call(text, plan, dialect)
                num_whole += 1
    assert num_whole > len(requests) // 2


def check_call(text: str, plan: ToolPlan, dialect: ToolDialect) -> None:
    """Read an answer and hold its one call to the function's schema."""
    parser = ToolParser(plan.reading(dialect))
    pieces = [*parser.push(text), *parser.flush()]
    assert [piece.text for piece in pieces if piece.kind == "call"] == ["f"], text
    assert not any(piece.kind == "content" for piece in pieces), text
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    schema = plan.tools[0].function.parameters
    found = list(jsonschema_rs.validator_for(schema).iter_errors(json.loads(arguments)))
    assert not found, (dialect.format.name, schema, arguments)
