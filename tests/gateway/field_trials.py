"""Requests that find out whether a line of docs/api.md's tables is true."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Json = Any
Document = Mapping[str, Json]

ANSWER: Final = {"role": "assistant", "content": "Hello"}
FUNCTION: Final = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL: Final = {"type": "function", "function": FUNCTION}
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA: Final = {"type": "object", "properties": {"b": {"type": "string"}}}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHAT: Final[Document] = {
    "model": "large",
    "messages": [{"role": "user", "content": "Hi"}],
    "seed": 7,
    "max_tokens": 9,
}
COMPLETION: Final[Document] = {"model": "large", "prompt": "Hi", "seed": 7, "max_tokens": 9}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A field's value in use, the fields that it needs beside it, and its values that mean off."""

    value: Json
    beside: Document = field(default_factory=dict)
    off: tuple[Json, ...] = (None,)


def trial(value: Json, *off: Json, **beside: Json) -> Trial:
    return Trial(value=value, beside=beside, off=(None, *off))


TALK: Final = [*CHAT["messages"], ANSWER]
TRIALS: Final[Mapping[str, Trial]] = {
    "model": trial("small"),
    "messages": trial([{"role": "user", "content": "What now?"}]),
    "prompt": trial("What now?"),
    "max_tokens": trial(8),
    "max_completion_tokens": trial(8),
    "temperature": trial(0.5),
    "top_p": trial(0.5),
    "frequency_penalty": trial(0.5),
    "presence_penalty": trial(0.5),
    "logit_bias": trial({"5": 1}),
    "seed": trial(8),
    "stop": trial("there"),
    "n": trial(2),
    "logprobs": trial(True),
    "top_logprobs": trial(2, logprobs=True),
    "stream": trial(True),
    "stream_options": trial({"include_usage": True}, stream=True),
    "tools": trial([TOOL]),
    "tool_choice": trial("required", tools=[TOOL]),
    "parallel_tool_calls": trial(False, tools=[TOOL]),
    "response_format": trial({"type": "json_object"}),
    "prediction": trial({"type": "content", "content": "Hello"}),
    "service_tier": trial("priority"),
    "metadata": trial({"a": "b"}),
    "user": trial("u1"),
    "safety_identifier": trial("s1"),
    "cache_salt": trial("s1"),
    "prompt_cache_key": trial("k1"),
    "prompt_cache_retention": trial("24h"),
    "prompt_cache_options": trial({"mode": "explicit", "ttl": "30m"}),
    "anthropic_billing": trial("x-anthropic-billing-header: cc_version=2"),
    "store": trial(True, False),
    "reasoning_effort": trial("low"),
    "thinking_token_budget": trial(9),
    "verbosity": trial("low"),
    "functions": trial([FUNCTION]),
    "function_call": trial({"name": "f"}, functions=[FUNCTION]),
    "modalities": trial(["text", "audio"], ["text"]),
    "audio": trial({"format": "wav", "voice": "alloy"}),
    "web_search_options": trial({}),
    "moderation": trial({"model": "m"}),
    "best_of": trial(2, 1),
    "echo": trial(True),
    "suffix": trial("the end", ""),
    "input_extra": trial([{"filename": "a.py", "text": "b"}]),
    "prompt_logprobs": trial(0),
    "return_token_ids": trial(True),
    "return_tokens_as_token_ids": trial(True, logprobs=True),
    "outrider": trial({"speculation": "off"}),
    "top_k": trial(5),
    "min_p": trial(0.5),
    "repetition_penalty": trial(1.5),
    "min_tokens": trial(3),
    "stop_token_ids": trial([5]),
    "ignore_eos": trial(True),
    "structured_outputs": trial({"choice": ["yes", "no"]}),
    "guided_json": trial(SCHEMA),
    "guided_regex": trial("a+"),
    "guided_choice": trial(["yes", "no"]),
    "guided_grammar": trial('root ::= "x"'),
    "regex": trial("a+"),
    "ebnf": trial('root ::= "x"'),
    "json_schema": trial(SCHEMA),
    "grammar": trial('root ::= "x"'),
    "chat_template_kwargs": trial({"enable_thinking": True}),
    "continue_final_message": trial(True, messages=TALK),
    "add_generation_prompt": trial(False),
}
TRIALS_OF_COMPLETIONS: Final = {
    **TRIALS,
    "logprobs": trial(2),
    "return_tokens_as_token_ids": trial(True, logprobs=2),
}


def message(**fields: Json) -> Document:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def part(**fields: Json) -> Document:
    return message(content=[{"type": "text", "text": "Hi", **fields}])


def answer(**fields: Json) -> Document:
    return {"messages": [*CHAT["messages"], {**ANSWER, **fields}]}


def called(call: Document, **result: Json) -> Document:
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": call["id"], "content": "4", **result}
    return {"messages": [*CHAT["messages"], made, told]}


def function(**fields: Json) -> Document:
    return {"tools": [{"type": "function", "function": {**FUNCTION, **fields}}]}


def formatted(**fields: Json) -> Document:
    return {"response_format": {**FORMAT, "json_schema": {**FORMAT["json_schema"], **fields}}}


BREAKPOINT: Final = {"mode": "explicit", "ttl": "30m"}
CUSTOM: Final = {"name": "f", "input": "x"}
GUESS: Final = {"prediction": {"type": "content", "content": [{"type": "text", "text": "Hello"}]}}
CHOSEN: Final = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}
OFFERED: Final = {"tools": [TOOL]}
IMAGE: Final = {"url": "data:image/png;base64,AA=="}

# Of each path inside the fields: a request with it, and the same without it, or with another value.
INSIDE: Final[Mapping[str, tuple[Document, Document]]] = {
    "messages.role": (message(role="system"), {}),
    "messages.content": (message(content="What now?"), {}),
    "messages.content.type": (part(), message(content="Ho")),
    "messages.content.text": (part(text="What now?"), {}),
    "messages.content.prompt_cache_breakpoint": (part(prompt_cache_breakpoint=BREAKPOINT), part()),
    "messages.content.prompt_cache_breakpoint.ttl": (
        part(prompt_cache_breakpoint={"mode": "explicit", "ttl": "1h"}),
        part(prompt_cache_breakpoint=BREAKPOINT),
    ),
    "messages.content.prompt_cache_breakpoint.mode": (
        part(prompt_cache_breakpoint=BREAKPOINT),
        part(prompt_cache_breakpoint=BREAKPOINT),
    ),
    "messages.content.image_url": (
        message(content=[{"type": "image_url", "image_url": IMAGE}]),
        part(),
    ),
    "messages.content.input_audio": (
        message(
            content=[{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]
        ),
        part(),
    ),
    "messages.content.file": (
        message(content=[{"type": "file", "file": {"file_id": "1"}}]),
        part(),
    ),
    "messages.content.refusal": (
        answer(content=[{"type": "refusal", "refusal": "No."}]),
        answer(refusal=None),
    ),
    "messages.name": (message(name="Ann"), message(name=None)),
    "messages.tool_calls": (called(CALL), {}),
    "messages.tool_calls.id": (called({**CALL, "id": "c2"}), called(CALL)),
    "messages.tool_calls.type": (called(CALL), {}),
    "messages.tool_calls.function": (called(CALL), {}),
    "messages.tool_calls.function.name": (
        called({**CALL, "function": {**CALL["function"], "name": "g"}}),
        called(CALL),
    ),
    "messages.tool_calls.function.arguments": (
        called({**CALL, "function": {**CALL["function"], "arguments": "{}"}}),
        called(CALL),
    ),
    "messages.tool_calls.custom": (
        called({"id": "c1", "type": "custom", "custom": CUSTOM}),
        called(CALL),
    ),
    "messages.tool_call_id": (called({**CALL, "id": "c2"}), called(CALL)),
    "messages.refusal": (answer(refusal="No."), answer(refusal=None)),
    "messages.audio": (answer(audio={"id": "1"}), answer(audio=None)),
    "messages.function_call": (
        answer(function_call=CALL["function"]),
        answer(function_call=None),
    ),
    "messages.function_call.name": (
        answer(function_call={**CALL["function"], "name": "g"}),
        answer(function_call=CALL["function"]),
    ),
    "messages.function_call.arguments": (
        answer(function_call={**CALL["function"], "arguments": "{}"}),
        answer(function_call=CALL["function"]),
    ),
    "functions.name": ({"functions": [{**FUNCTION, "name": "g"}]}, {"functions": [FUNCTION]}),
    "functions.description": (
        {"functions": [{**FUNCTION, "description": "Adds."}]},
        {"functions": [FUNCTION]},
    ),
    "functions.parameters": (
        {"functions": [{**FUNCTION, "parameters": SCHEMA}]},
        {"functions": [FUNCTION]},
    ),
    "function_call.name": (
        {"functions": [FUNCTION], "function_call": {"name": "f"}},
        {"functions": [FUNCTION]},
    ),
    "tools.type": (OFFERED, {}),
    "tools.function": (OFFERED, {}),
    "tools.function.name": (function(name="g"), OFFERED),
    "tools.function.description": (function(description="Adds."), OFFERED),
    "tools.function.parameters": (function(parameters=SCHEMA), OFFERED),
    "tools.function.strict": (function(strict=True), OFFERED),
    "tools.custom": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, OFFERED),
    "tool_choice.type": (CHOSEN, OFFERED),
    "tool_choice.function": (CHOSEN, OFFERED),
    "tool_choice.function.name": (CHOSEN, OFFERED),
    "tool_choice.allowed_tools": (
        {
            **OFFERED,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [TOOL]},
            },
        },
        OFFERED,
    ),
    "tool_choice.custom": (
        {**OFFERED, "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        OFFERED,
    ),
    "response_format.type": ({"response_format": {"type": "json_object"}}, {}),
    "response_format.json_schema": (formatted(), {}),
    "response_format.json_schema.schema": (formatted(schema=FUNCTION["parameters"]), formatted()),
    "response_format.json_schema.name": (formatted(name="other"), formatted()),
    "response_format.json_schema.description": (formatted(description="A thing."), formatted()),
    "response_format.json_schema.strict": (formatted(strict=True), formatted()),
    "prediction.type": (GUESS, {}),
    "prediction.content": (GUESS, {}),
    "prediction.content.type": (GUESS, {}),
    "prediction.content.text": (GUESS, {}),
    "prediction.content.prompt_cache_breakpoint": (
        {
            "prediction": {
                "type": "content",
                "content": [
                    {"type": "text", "text": "Hello", "prompt_cache_breakpoint": BREAKPOINT}
                ],
            }
        },
        GUESS,
    ),
    "stream_options.include_usage": (
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True},
    ),
    "stream_options.include_obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ),
    "prompt_cache_options.mode": (
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_options": {}},
    ),
    "prompt_cache_options.ttl": (
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_options": {}},
    ),
}
TEMPLATE: Final = """\
{%- if tools %}<|im_start|>tools {{ tools | tojson }} in <tool_call><|im_end|>{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}
{%- if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif -%}
{%- endif -%}
"""
"""All that a message may have is read by a model."""
