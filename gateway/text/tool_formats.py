"""The formats in which model families write tool calls, and the one that a chat template speaks.

A format is a row of texts that stand around a call's name and its arguments; grammar, parser and
prompts are made of them. The table of families is in docs/models.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

ToolFormatName = Literal[
    "hermes", "llama3", "mistral", "mistral11", "granite", "phi4", "cohere", "deepseek"
]

ANY_ID: Final = "#"
"""In a format's texts: the id of a call, one to nine letters or digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Calls as text: sections of `marker lead call (separator call)* trail end`.

    A call is `call_begin NAME call_middle ARGUMENTS call_end`. `separator` None: one call in a
    section. `repeats`: sections may follow one another, with `between` between them; else a
    section ends the answer. `marker` empty: the call is the whole answer.
    """

    name: ToolFormatName
    marker: str = ""
    lead: str = ""
    call_begin: str = '{"name": "'
    call_middle: str = '", "arguments": '
    call_end: str = "}"
    separator: str | None = None
    trail: str = ""
    end: str = ""
    repeats: bool = False
    between: str = "\n"
    system_field: str = ""
    """The field of the system message in which the template expects the tools, where it has one."""
    result_role: str = "user"
    """The role of results, where the template does not render them itself."""
    has_text_arguments: bool = False
    """The template joins arguments to text itself, so it needs them as text."""

    @property
    def trigger(self) -> str:
        """The text that commits an answer to a call."""
        return self.marker or self.call_begin.replace(" ", "").removesuffix('"')

    @property
    def has_parallel_calls(self) -> bool:
        """True if an answer may hold more than one call."""
        return self.repeats or self.separator is not None

    @property
    def first_char(self) -> str:
        """The character that arguments begin with; empty where any JSON value is possible.

        Arguments inside an object end where the object does; all others end with themselves.
        """
        return "" if self.call_end.startswith("}") else "{"

    @property
    def marks(self) -> str:
        """All texts of the format, in which special tokens may stand."""
        parts = (self.lead, self.call_begin, self.call_middle, self.call_end, self.trail)
        return "\n".join([self.marker, *parts, self.end])


def _wide(words: str) -> str:
    """Return DeepSeek's spelling of a special token."""
    return f"<\N{FULLWIDTH VERTICAL LINE}{words}\N{FULLWIDTH VERTICAL LINE}>"


HERMES: Final = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    lead="\n",
    trail="\n",
    end="</tool_call>",
    repeats=True,
)
# Its template refuses answers with several calls.
LLAMA3: Final = ToolFormat(name="llama3", call_middle='", "parameters": ')
MISTRAL: Final = ToolFormat(
    name="mistral", marker="[TOOL_CALLS]", lead="[", end="]", separator=", "
)
MISTRAL11: Final = ToolFormat(
    name="mistral11",
    marker="[TOOL_CALLS]",
    call_begin="",
    call_middle="[ARGS]",
    call_end="",
    repeats=True,
    between="",
)
GRANITE: Final = ToolFormat(
    name="granite", marker="<|tool_call|>", lead="[", end="]", separator=", "
)
PHI4: Final = ToolFormat(
    name="phi4",
    marker="<|tool_call|>",
    lead="[",
    trail="]",
    end="<|/tool_call|>",
    separator=", ",
    system_field="tools",
    result_role="tool_response",
)
COHERE: Final = ToolFormat(
    name="cohere",
    marker="<|START_ACTION|>",
    lead="[\n    ",
    call_begin=f'{{"tool_call_id": "{ANY_ID}", "tool_name": "',
    call_middle='", "parameters": ',
    separator=",\n    ",
    trail="\n]",
    end="<|END_ACTION|>",
)
DEEPSEEK: Final = ToolFormat(
    name="deepseek",
    marker=_wide("tool▁calls▁begin"),
    call_begin=_wide("tool▁call▁begin"),
    call_middle=_wide("tool▁sep"),
    call_end=_wide("tool▁call▁end"),
    separator="",
    end=_wide("tool▁calls▁end"),
)
FORMATS: Final[Mapping[ToolFormatName, ToolFormat]] = {
    form.name: form
    for form in (HERMES, LLAMA3, MISTRAL, MISTRAL11, GRANITE, PHI4, COHERE, DEEPSEEK)
}
assert set(FORMATS) == set(get_args(ToolFormatName))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """The form in which one model reads and writes tools.

    `is_native`: its chat template renders tools, calls and results itself, in this format.
    `special_ids`: the special tokens in the format's texts; a detokenizer leaves them out.
    """

    format: ToolFormat
    is_native: bool
    special_ids: Mapping[str, int]


def find_dialect(
    template: Any, special_ids: Mapping[str, int], wanted: ToolFormatName | None = None
) -> ToolDialect:
    """Return the dialect of a chat template (text, named texts or None); `wanted` overrides it.

    `special_ids`: the tokenizer's special tokens by text. A template that knows no tools, or writes
    them in another way, gets hermes, rendered by us.
    """
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    text = "\n".join(map(str, texts)).replace('\\"', '"').replace("\\n", "\n")
    found = _template_format(text)
    form, is_native = found or HERMES, found is not None and not found.system_field
    if wanted is not None and form.name != wanted:
        # A template that we do not recognise may well write the wanted format.
        form, is_native = FORMATS[wanted], found is None and _shows_tools(text)
    marks = {mark: token_id for mark, token_id in special_ids.items() if mark in form.marks}
    return ToolDialect(format=form, is_native=is_native, special_ids=marks)


def _template_format(text: str) -> ToolFormat | None:
    """Return the format that a template writes; None for none and for those that are unknown."""
    if not _shows_tools(text):
        return None
    if "[TOOL_CALLS]" in text:
        return _mistral(text)
    if '{"name": function name, "parameters":' in text:
        return LLAMA3
    if "<|START_ACTION|>" in text:
        return COHERE
    if DEEPSEEK.marker in text:
        return _deepseek(text)
    if "<|tool|>" in text:
        return _phi4(text)
    if "<|tool_call|>" in text:
        return GRANITE
    # Qwen3-Coder and GLM write XML between the same tags.
    if "<tool_call>" in text and not re.search("<function=|<arg_key>", text):
        return HERMES
    return None


def _mistral(text: str) -> ToolFormat:
    if "[ARGS]" not in text:
        return replace(MISTRAL, lead=" [") if "[TOOL_CALLS] [" in text else MISTRAL
    if "[CALL_ID]" in text:
        return replace(MISTRAL11, call_middle=f"[CALL_ID]{ANY_ID}[ARGS]")
    return MISTRAL11


def _deepseek(text: str) -> ToolFormat:
    """Return the format of DeepSeek V3.1, or that of V3 and R1 before it."""
    form = DEEPSEEK
    if "```json" in text:
        form = replace(
            form,
            call_begin=f"{form.call_begin}function{form.call_middle}",
            call_middle="\n```json\n",
            call_end=f"\n```{form.call_end}",
            separator="\n",
        )
    has_json = re.search(r"arguments(['\"]\])?\s*\|\s*tojson", text) is not None
    return replace(form, has_text_arguments=not has_json)


def _phi4(text: str) -> ToolFormat:
    """Return the format of Phi-4-mini's own template, or of one that renders tools itself."""
    if re.search(r"message(\.|\[['\"])tools\b", text):
        return PHI4
    if '<|tool_call|>{"name"' in text:
        return replace(
            PHI4, lead="", trail="", separator=None, repeats=True, between="", system_field=""
        )
    return replace(PHI4, system_field="")


def _shows_tools(text: str) -> bool:
    return re.search(r"\btools\b", text) is not None
