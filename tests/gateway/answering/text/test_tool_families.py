"""Formats of tools by model family: told from templates, shown, enforced and read."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import PLAIN
from outrider.gateway.answering.text.tool_formats import (
    ANY_ID,
    FORMATS,
    ToolDialect,
    ToolFormat,
    find_dialect,
)
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tool_prompt import write_calls
from outrider.gateway.contract.schema.kinds import ToolFormatName
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from tests.gateway.answering.text.tool_cases import (
    CALLED,
    HELLO,
    RESULT,
    TOOLS,
    compiled,
    plan,
    request,
    verdict,
)
from tests.gateway.conftest import LengthPolicy
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.grammars import shipped_compiler

# Templates as the families write them, cut down to the parts that tell the formats.
QWEN3 = r"""{%- if tools %}{{- "# Tools\n<tools>" }}{%- for tool in tools %}{{- tool | tojson }}
{%- endfor %}{{- "</tools>\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}" }}
{%- endif %}"""
LLAMA31 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of \
argument name and its value}.' }}{{ tools }}"""
MISTRAL3 = """{{- "[AVAILABLE_TOOLS] [" }}{{ tools }}{{- "[TOOL_CALLS] [" }}"""
MISTRAL7 = """{{- "[AVAILABLE_TOOLS][" }}{{ tools }}{{- "[TOOL_CALLS][" }}"""
MISTRAL11 = (
    """{{ tools }}{{- "[TOOL_CALLS]" + tools[0].function.name + "[CALL_ID]" + id + "[ARGS]" }}"""
)
MISTRAL13 = """{{ tools }}{{- "[TOOL_CALLS]" + tools[0].function.name + "[ARGS]" }}"""
GRANITE3 = """{%- if tools %}{{ "When a tool is required to answer, respond with <|tool_call|> \
followed by a JSON list of tools used." }}{{ tools | tojson(indent=4) }}{%- endif %}"""
GRANITE4 = QWEN3
PHI4_MINI = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}{{- '<|end|>' }}{% endfor %}"""
PHI4_OWN = """{%- for tool in tools %}{{ '<|tool|>' + (tool['function'] | tojson) + '<|/tool|>' }}\
{%- endfor %}{{ '<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>' }}"""
COMMAND_R7B = """{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}\
<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>"""
DEEPSEEK31 = """{{ tools }}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + \
tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}"""  # noqa: RUF001
DEEPSEEK3 = """{{ tools }}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + \
'<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n' + arguments | tojson }}"""  # noqa: RUF001
QWEN3_CODER = """{{ tools }}<tool_call>\n<function=f>\n<parameter=a>"""
SEED_OSS = """{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=a>"""
GLM45 = """{{ tools }}<tool_call>{function-name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>"""
GLM47 = """{{ tools }}<tool_call>{function-name}<arg_key>k</arg_key><arg_value>v</arg_value>"""
GEMMA3 = """{% for message in messages %}<start_of_turn>{{ message.role }}{% endfor %}"""

WEATHER_CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}
CLOCK_CALL: dict[str, Any] = {"name": "clock", "arguments": {}}
OSLO = '{"city": "Oslo"}'
FREE_IDS = (0, 1, 3, 4, 5)
"""Special tokens of the shipped tokenizer that play those of a format."""


@pytest.mark.parametrize(
    ("template", "name", "is_native", "call"),
    [
        (
            QWEN3,
            "hermes",
            True,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        ),
        (
            GRANITE4,
            "hermes",
            True,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        ),
        (
            {"default": "x", "tool_use": QWEN3},
            "hermes",
            True,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        ),
        (LLAMA31, "llama3", True, f'{{"name": "get_weather", "parameters": {OSLO}}}'),
        (
            MISTRAL3,
            "mistral",
            True,
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}}}]',
        ),
        (
            MISTRAL7,
            "mistral",
            True,
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}]',
        ),
        (MISTRAL11, "mistral11", True, f"[TOOL_CALLS]get_weather[CALL_ID]0[ARGS]{OSLO}"),
        (MISTRAL13, "mistral11", True, f"[TOOL_CALLS]get_weather[ARGS]{OSLO}"),
        (
            GRANITE3,
            "granite",
            True,
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}]',
        ),
        (
            PHI4_MINI,
            "phi4",
            False,
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}]<|/tool_call|>',
        ),
        (
            PHI4_OWN,
            "phi4",
            True,
            f'<|tool_call|>{{"name": "get_weather", "arguments": {OSLO}}}<|/tool_call|>',
        ),
        (
            COMMAND_R7B,
            "cohere",
            True,
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
            f'"parameters": {OSLO}}}\n]<|END_ACTION|>',
        ),
        (
            DEEPSEEK31,
            "deepseek",
            True,
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}"  # noqa: RUF001
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        ),
        (
            DEEPSEEK3,
            "deepseek",
            True,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"  # noqa: RUF001
            f"get_weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        ),
        (
            QWEN3_CODER,
            "qwen3_coder",
            True,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            SEED_OSS,
            "qwen3_coder",
            True,
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
            "</function>\n</seed:tool_call>",
        ),
        (
            GLM45,
            "glm45",
            True,
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "</tool_call>",
        ),
        (
            GLM47,
            "glm45",
            True,
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        ),
        (
            GEMMA3,
            "hermes",
            False,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        ),
        (
            None,
            "hermes",
            False,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        ),
    ],
)
def test_a_template_tells_the_format_of_its_family(
    template: Any, name: str, is_native: bool, call: str
) -> None:
    dialect = find_dialect(template, {"[TOOL_CALLS]": 5, "<s>": 1})
    assert (dialect.format.name, dialect.is_native) == (name, is_native)
    assert write_calls([WEATHER_CALL], dialect.format) == call
    assert read(call, dialect.format) == ("", [("get_weather", OSLO)])
    is_mistral = name.startswith("mistral")
    assert dialect.special_ids == ({"[TOOL_CALLS]": 5} if is_mistral else {})


def read(text: str, form: ToolFormat) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the name and arguments of each call."""
    parser = ToolParser(ToolReading(format=form))
    content, calls = "", []
    for piece in [*parser.push(text), *parser.flush()]:
        match piece.kind:
            case "content":
                content += piece.text
            case "call":
                calls.append((piece.text, ""))
            case "arguments":
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


def special_marks(form: ToolFormat) -> dict[str, int]:
    """Ids for the format's marks, as in a tokenizer in which they are special tokens."""
    texts = [form.marker, form.call_begin, form.call_middle, form.call_end, form.end]
    if form.xml is not None and not form.xml.pad:  # as GLM has them; Qwen's tags are text
        texts = [form.marker, form.end, form.xml.key_begin, form.xml.key_end, form.xml.value_end]
    marks = dict.fromkeys(text.strip() for text in texts if text and text[0] in "<[")
    return dict(zip((mark for mark in marks if ANY_ID not in mark), FREE_IDS, strict=False))


VARIANTS = [
    *(form for form in FORMATS.values() if not form.has_channels),
    *(find_dialect(t, {}).format for t in (MISTRAL11, DEEPSEEK3, PHI4_OWN, SEED_OSS, GLM47)),
]
CASES = [(form, False) for form in VARIANTS] + [
    (form, True) for form in VARIANTS[: len(FORMATS) - 1] if special_marks(form)
]


@pytest.mark.parametrize(
    ("form", "is_special"),
    CASES,
    ids=[f"{form.name}-{form.call_middle.strip()}-{special}" for form, special in CASES],
)
def test_the_grammar_of_a_family_allows_its_calls_and_no_others(
    form: ToolFormat, is_special: bool
) -> None:
    special = special_marks(form) if is_special else {}
    dialect = ToolDialect(format=form, is_native=True, special_ids=special)
    one, two = write_calls([WEATHER_CALL], form), write_calls([WEATHER_CALL, CLOCK_CALL], form)
    auto = compiled(dialect)
    assert verdict(auto, "Hi", special) == "whole"
    assert verdict(auto, one, special) == "whole"
    wrong = (
        one.replace("get_weather", "other"),
        one.replace("get_weather", "clock"),
        one.replace('"Oslo"', "5"),
        one.replace(OSLO, "{}"),
        one.replace(OSLO, "5"),
    )
    for text in set(wrong) - {one}:
        assert verdict(auto, text, special) == "refused", text
    if form.marker:
        assert verdict(auto, f"Hi {one}", special) == "whole"
    if form.has_parallel_calls:
        assert verdict(auto, two, special) == "whole"
        assert verdict(compiled(dialect, parallel_tool_calls=False), two, special) != "whole"
        assert [name for name, _ in read(two, form)[1]] == ["get_weather", "clock"]
    required = compiled(dialect, tool_choice="required")
    assert verdict(required, one, special) == "whole"
    assert verdict(required, "Hi", special) == "refused"
    assert verdict(required, "", special) == "begun"
    named = compiled(dialect, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert verdict(named, write_calls([CLOCK_CALL], form), special) == "whole"
    assert verdict(named, one, special) == "refused"


PATTERNED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[a-z]{2}$"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("name", ["hermes", "mistral11", "cohere", "glm45"])
def test_patterns_are_enforced_beside_special_tokens(name: ToolFormatName) -> None:
    """Our compiler adds the rules of patterns to the grammar's text, which names tokens too."""
    form = FORMATS[name]
    special = special_marks(form)
    dialect = ToolDialect(format=form, is_native=True, special_ids=special)
    spec = plan(tools=[PATTERNED], tool_choice="required").grammar(dialect, PLAIN, "none")
    grammar = shipped_compiler().compile(spec).result(120)
    for code, expected in (("no", "whole"), ("nor", "refused"), ("NO", "refused")):
        written = f'"{code}"' if form.xml else code  # as JSON, where strings are plain text
        text = write_calls([{"name": "f", "arguments": {"code": written}}], form)
        assert verdict(grammar, text, special) == expected, text


def shown(folder: Any, template: str, **options: Any) -> str:
    """Render a conversation with a call and its result."""
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = template
    tokenizer = ChatTokenizer(loaded, **options)
    asked = request(messages=[HELLO, CALLED, RESULT])
    prompt = asyncio.run(tokenizer.render_chat(asked.messages, None, asked.tools or ()))
    return str(loaded.decode(prompt.token_ids))


def test_phi_gets_its_tools_in_a_field_of_the_system_message(tokenizer_folder: Any) -> None:
    text = shown(tokenizer_folder, PHI4_MINI)
    listed = text.partition("<|system|><|tool|>")[2].partition("<|/tool|>")[0]
    assert [tool["name"] for tool in json.loads(listed)] == ["get_weather", "clock"]
    assert "<|assistant|><|tool_call|>[{" in text
    assert "<|tool_response|>Rain<|end|>" in text


def test_arguments_are_text_where_a_template_joins_them(tokenizer_folder: Any) -> None:
    template = (
        "{{ tools[0].function.name }}{% for m in messages %}{% for tool in m.tool_calls %}"
        "{{ '<｜tool▁calls▁begin｜>' + tool['function']['arguments'] }}"  # noqa: RUF001
        "{% endfor %}{% endfor %}"
    )
    assert OSLO in shown(tokenizer_folder, template)


def test_a_wanted_format_is_shown_where_the_template_knows_no_tools(tokenizer_folder: Any) -> None:
    template = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
    text = shown(tokenizer_folder, template, tool_format="mistral11")
    assert '[TOOL_CALLS]function-name[ARGS]{"argument-name": "value"}' in text
    assert f"[TOOL_CALLS]get_weather[ARGS]{OSLO}" in text
    assert "<tool_call>" not in text


def answers(folder: Any, template: str, text: str, marks: list[str], **fields: Any) -> list[Any]:
    """Ask for an answer with tools that is written so, whole and streamed, a token at a time."""
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.add_special_tokens({"additional_special_tokens": marks})
    loaded.chat_template = template
    tokenizer = ChatTokenizer(loaded)
    ids = loaded.encode(text, add_special_tokens=False)
    script = Script(steps=[Step(token_ids=(token_id,)) for token_id in ids])
    engine = ScriptedClient(vocab_size=500, max_context=4096, script=lambda _: script)
    parts = GatewayParts(
        engine=engine, tokenizers={"large": tokenizer, "small": tokenizer}, router=LengthPolicy()
    )
    body = {"model": "large", "messages": [HELLO], "tools": TOOLS, **fields}

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(build_app(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            whole = await http.post("/v1/chat/completions", json=body)
            streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
        assert whole.status_code == 200, whole.text
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        return [whole.json(), joined([json.loads(event) for event in events[:-1]])]

    return asyncio.run(ask())


def joined(chunks: list[Any]) -> Any:
    """Put the deltas of a stream together to the message that they make."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": None}
    finish_reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        finish_reason = finish_reason or choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            if choice["delta"].get(name):
                message[name] = (message[name] or "") + choice["delta"][name]
        for call in choice["delta"].get("tool_calls") or []:
            message["tool_calls"] = message["tool_calls"] or []
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            function = message["tool_calls"][call["index"]]["function"]
            function["name"] += call["function"].get("name") or ""
            function["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (MISTRAL13, ["[TOOL_CALLS]", "[ARGS]"]),
        (COMMAND_R7B, ["<|START_ACTION|>", "<|END_ACTION|>"]),
        (QWEN3_CODER, []),
        (GLM45, ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"]),
    ],
)
def test_calls_reach_the_client(tokenizer_folder: Any, template: str, marks: list[str]) -> None:
    form = find_dialect(template, {}).format
    text = "Let me see." + write_calls([WEATHER_CALL, CLOCK_CALL], form)
    for answer in answers(tokenizer_folder, template, text, marks):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert calls == [
            {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            {"name": "clock", "arguments": "{}"},
        ]


GPT_OSS = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}\
{{ messages[0].content }}{{ '<|start|>assistant' }}{# <|channel|>analysis commentary final #}"""
HARMONY_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"]


def test_channels_reach_the_client_as_reasoning_and_calls(tokenizer_folder: Any) -> None:
    text = (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    )
    marks = [*HARMONY_MARKS, "<|end|>", "<|return|>"]
    for answer in answers(tokenizer_folder, GPT_OSS, text, marks):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "Look it up."
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


@pytest.mark.parametrize(
    ("template", "text", "marks"),
    [
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hello!<|return|>",
            [*HARMONY_MARKS, "<|end|>", "<|return|>"],
        ),
        (
            "{{ messages[0].content }}{# <|START_THINKING|> #}",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>",
            ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        ),
        (
            "{{ messages[0].content }}{# Here is my thought process: #}",
            "Here is my thought process: Hm.Here is my response: Hello!",
            [],
        ),
    ],
)
def test_reasoning_reaches_the_client_apart(
    tokenizer_folder: Any, template: str, text: str, marks: list[str]
) -> None:
    for answer in answers(tokenizer_folder, template, text, marks, tools=[], logprobs=True):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["content"] == "Hello!"
