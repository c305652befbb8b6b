"""The formats in which model families write tool calls, and the one that a chat template speaks.

A format is a row of texts that stand around a call's name and its arguments; grammar, parser and
prompts are made of them. The table of families is in docs/models.md.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, get_args

from outrider.gateway.contract.schema.kinds import ToolFormatName

ANY_ID: Final = "#"
"""In a format's texts: the id of a call, one to nine letters or digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlArguments:
    """Arguments between tags: `key_begin KEY key_end value_begin VALUE value_end between`, each."""

    key_begin: str
    key_end: str
    value_begin: str = ""
    value_end: str
    between: str = "\n"
    pad: str = ""
    """Stands around each value and belongs to the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Calls as text: sections of `marker lead call (separator call)* trail end`.

    A call is `call_begin NAME call_middle ARGUMENTS call_end`.
    """

    name: ToolFormatName
    marker: str = ""
    """Empty: the call is the whole answer."""
    lead: str = ""
    call_begin: str = '{"name": "'
    call_middle: str = '", "arguments": '
    call_end: str = "}"
    separator: str | None = None
    """None: one call in a section."""
    trail: str = ""
    end: str = ""
    repeats: bool = False
    """Sections may follow one another, with `between` between them; else a section ends the
    answer."""
    between: str = "\n"
    xml: XmlArguments | None = None
    """The tags around arguments; None: they are a JSON object."""
    system_field: str = ""
    """The field of the system message in which the template expects the tools, where it has one."""
    result_role: str = "user"
    """The role of results, where the template does not render them itself."""
    has_channels: bool = False
    """Calls are messages with headers, as channels.py gives them; one an answer."""
    has_text_arguments: bool = False
    """The template joins arguments to text itself, so it needs them as text."""

    @property
    def trigger(self) -> str:
        """The text that commits an answer to a call."""
        return self.marker or self.call_begin.replace(" ", "").removesuffix('"')

    @property
    def has_parallel_calls(self) -> bool:
        """True if an answer may hold more than one call."""
        return (self.repeats or self.separator is not None) and not self.has_channels

    @property
    def first_char(self) -> str:
        """The character that arguments begin with; empty where any JSON value is possible.

        Arguments inside an object end where the object does; all others end with themselves.
        """
        if self.xml is not None:
            return "<"
        return "" if self.call_end.startswith("}") else "{"

    @property
    def marks(self) -> str:
        """The format's texts, in which special tokens may stand."""
        parts = (self.lead, self.call_begin, self.call_middle, self.call_end, self.trail)
        tags = () if self.xml is None else astuple(self.xml)
        return "\n".join([self.marker, *parts, self.end, *tags])


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
QWEN3_CODER: Final = ToolFormat(
    name="qwen3_coder",
    marker="<tool_call>",
    lead="\n",
    call_begin="<function=",
    call_middle=">\n",
    call_end="</function>",
    trail="\n",
    end="</tool_call>",
    repeats=True,
    xml=XmlArguments(key_begin="<parameter=", key_end=">", value_end="</parameter>", pad="\n"),
)
GLM45: Final = ToolFormat(
    name="glm45",
    marker="<tool_call>",
    call_begin="",
    call_middle="\n",
    call_end="",
    end="</tool_call>",
    repeats=True,
    xml=XmlArguments(
        key_begin="<arg_key>",
        key_end="</arg_key>",
        value_begin="\n<arg_value>",
        value_end="</arg_value>",
    ),
)
HARMONY: Final = ToolFormat(
    name="harmony",
    marker="<|channel|>commentary to=functions.",
    call_begin="",
    call_middle="<|message|>",
    call_end="",
    repeats=True,
    between="",
    has_channels=True,
)
FORMATS: Final[Mapping[ToolFormatName, ToolFormat]] = {
    form.name: form
    for form in (
        HERMES,
        LLAMA3,
        MISTRAL,
        MISTRAL11,
        GRANITE,
        PHI4,
        COHERE,
        DEEPSEEK,
        QWEN3_CODER,
        GLM45,
        HARMONY,
    )
}
assert set(FORMATS) == set(get_args(ToolFormatName))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """The form in which one model reads and writes tools."""

    format: ToolFormat
    is_native: bool
    """Its chat template renders tools, calls and results itself, in this format."""
    special_ids: Mapping[str, int]
    """The special tokens in the format's texts; a detokenizer leaves them out."""


def find_dialect(
    template: Any, special_ids: Mapping[str, int], wanted: ToolFormatName | None = None
) -> ToolDialect:
    """Return the dialect of a chat template (text, named texts or None); `wanted` overrides it.

    `special_ids`: the tokenizer's special tokens by text. A template that knows no tools, or writes
    them in another way, gets hermes, rendered by us. Raises ValueError for channels where the
    template has none.
    """
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    text = "\n".join(map(str, texts)).replace('\\"', '"').replace("\\n", "\n")
    found = _template_format(text)
    form, is_native = found or HERMES, found is not None and not found.system_field
    if wanted is not None and form.name != wanted:
        if FORMATS[wanted].has_channels:
            raise ValueError(f"tool_format {wanted!r} needs a chat template with channels")
        # A template that we do not recognise may well write the wanted format.
        form, is_native = FORMATS[wanted], found is None and _shows_tools(text)
    marks = {mark: token_id for mark, token_id in special_ids.items() if mark in form.marks}
    return ToolDialect(format=form, is_native=is_native, special_ids=marks)


def _template_format(text: str) -> ToolFormat | None:
    """Return the format that a template writes; None for none and for those that are unknown."""
    if not _shows_tools(text):
        return None
    for marks, form in _TOLD_BY:
        if all(mark in text for mark in marks):
            return form if isinstance(form, ToolFormat) else form(text)
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


def _glm(text: str) -> ToolFormat:
    """Return the format of GLM 4.5, or that of 4.7 and later, without line ends."""
    if GLM45.xml is None or "</arg_key><arg_value>" not in text:
        return GLM45
    tags = replace(GLM45.xml, value_begin="<arg_value>", between="")
    return replace(GLM45, call_middle="", between="", xml=tags)


def _seed(text: str) -> ToolFormat:
    """Return the format of Seed-OSS, which is Qwen's with tags of its own around a call."""
    assert QWEN3_CODER.xml is not None, "its arguments are between tags"
    tags = replace(QWEN3_CODER.xml, pad="")
    begin, end = "<seed:tool_call>", "</seed:tool_call>"
    return replace(QWEN3_CODER, marker=begin, end=end, xml=tags)


_TOLD_BY: Final[Sequence[tuple[Sequence[str], ToolFormat | Callable[[str], ToolFormat]]]] = (
    (["<|channel|>analysis", "commentary"], HARMONY),
    (["[TOOL_CALLS]"], _mistral),
    (['{"name": function name, "parameters":'], LLAMA3),
    (["<|START_ACTION|>"], COHERE),
    ([DEEPSEEK.marker], _deepseek),
    (["<|tool|>"], _phi4),
    (["<|tool_call|>"], GRANITE),
    (["<seed:tool_call>"], _seed),
    (["<tool_call>", "<arg_key>"], _glm),
    (["<tool_call>", "<function="], QWEN3_CODER),
    (["<tool_call>"], HERMES),
)
"""Texts in a template that tell its format; the first row of which all are there."""


def _shows_tools(text: str) -> bool:
    return re.search(r"\btools\b", text) is not None
