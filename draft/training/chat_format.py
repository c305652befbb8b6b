"""The pair's chat template, and in Python what it makes of tools: training sees the same."""

from collections.abc import Sequence

from outrider.draft.training.tasks.base import TaskMessage, TaskTool

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))

# A tool is one line: name(city: string, days?: integer): what it does. Calls and results have the
# form of the hermes family; a result is the user's turn, as in Qwen's template.
CHAT_TEMPLATE = r"""
{%- macro signature(tool) -%}
{%- set f = tool.function if tool.function is defined else tool -%}
{%- set schema = f.parameters if f.parameters is defined and f.parameters else {} -%}
{%- set required = schema.required if schema.required is defined else [] -%}
{{- f.name + '(' -}}
{%- for name, spec in (schema.properties if schema.properties is defined else {}).items() -%}
{{- (', ' if not loop.first else '') + name + ('' if name in required else '?') + ': ' -}}
{%- set kind = spec.type if spec.type is string else 'any' -%}
{{- spec.enum | join('|') if spec.enum is defined else kind -}}
{%- endfor -%}
{{- ')' + (': ' + f.description if f.description is defined and f.description else '') -}}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
{%- if messages[0].role == 'system' -%}
{%- set system, rest = messages[0].content + '\n\n', messages[1:] -%}
{%- else -%}
{%- set system, rest = '', messages -%}
{%- endif -%}
{{- '<|system|>' + system + 'Tools:' -}}
{%- for tool in tools -%}{{- '\n' + signature(tool) -}}{%- endfor -%}
{{- eos_token -}}
{%- else -%}
{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'tool' -%}
{{- '<|user|>' if loop.first or loop.previtem.role != 'tool' else '\n' -}}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' -}}
{{- eos_token if loop.last or loop.nextitem.role != 'tool' -}}
{%- elif message.role in ['system', 'user', 'assistant'] -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\n{"name": ' + f.name | tojson + ', "arguments": ' -}}
{{- f.arguments if f.arguments is string else f.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- else -%}
{{- raise_exception('roles are system, user, assistant and tool, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""".strip()


def with_tools(messages: Sequence[TaskMessage], tools: Sequence[TaskTool]) -> list[TaskMessage]:
    """The chat with its tools written into the system message, as CHAT_TEMPLATE renders them."""
    if not tools:
        return list(messages)
    rest, system = list(messages), ""
    if rest and rest[0]["role"] == "system":
        system = rest.pop(0)["content"] + "\n\n"
    lines = [_signature(tool["function"]) for tool in tools]
    return [TaskMessage(role="system", content="\n".join((f"{system}Tools:", *lines))), *rest]


def _signature(function: TaskTool) -> str:
    schema = function["parameters"]
    shown = [
        f"{name}{'' if name in schema['required'] else '?'}: {spec['type']}"
        for name, spec in schema["properties"].items()
    ]
    return f"{function['name']}({', '.join(shown)}): {function['description']}"
