"""The formats in which model families write tool calls, and the one that a chat template speaks.

hermes (Qwen, Hermes): `<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`, any number,
among text. llama3 (Llama 3.1 and 3.2): `{"name": "f", "parameters": {…}}` is the whole answer.
mistral (up to v7 of its tokenizer): `[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]` ends the
answer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

ToolFormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Calls as text: `marker lead call (separator call)* trail end`.

    A call is `{"name": "NAME", "ARGUMENTS_KEY": ARGUMENTS}`. `separator` None: one call between
    marker and end, but `repeats` of the whole. `marker` empty: the call is the whole answer.
    """

    name: ToolFormatName
    marker: str = ""
    lead: str = ""
    trail: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    separator: str | None = None
    repeats: bool = False

    @property
    def trigger(self) -> str:
        """The text that commits an answer to a call."""
        return self.marker or '{"name":'

    @property
    def has_parallel_calls(self) -> bool:
        """True if an answer may hold more than one call."""
        return self.repeats or self.separator is not None


HERMES: Final = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    lead="\n",
    trail="\n",
    end="</tool_call>",
    repeats=True,
)
# Its template refuses answers with several calls.
LLAMA3: Final = ToolFormat(name="llama3", arguments_key="parameters")
MISTRAL: Final = ToolFormat(
    name="mistral", marker="[TOOL_CALLS]", lead="[", end="]", separator=", "
)
FORMATS: Final[Mapping[ToolFormatName, ToolFormat]] = {
    form.name: form for form in (HERMES, LLAMA3, MISTRAL)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """The form in which one model reads and writes tools.

    `is_native`: its chat template renders tools, calls and results itself, in this format.
    `special_ids`: of the format's marker and end, those that are special tokens, whose text a
    detokenizer leaves out.
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
    text = "\n".join(map(str, texts)).replace('\\"', '"')
    found = _native_format(text)
    form, is_native = found or HERMES, found is not None
    if wanted is not None and form.name != wanted:
        # A template that we do not recognise may well write the wanted format.
        form, is_native = FORMATS[wanted], found is None and _shows_tools(text)
    marks = {mark: special_ids[mark] for mark in (form.marker, form.end) if mark in special_ids}
    return ToolDialect(format=form, is_native=is_native, special_ids=marks)


def _native_format(text: str) -> ToolFormat | None:
    """The format that a template writes; None for none and for those that we do not know."""
    if not _shows_tools(text):
        return None
    if "[TOOL_CALLS]" in text:
        if "[ARGS]" in text or "[CALL_ID]" in text:  # v11 and later
            return None
        return replace(MISTRAL, lead=" [") if "[TOOL_CALLS] [" in text else MISTRAL
    if '{"name": function name, "parameters":' in text:
        return LLAMA3
    # Qwen3-Coder and GLM write XML between the same tags.
    if "<tool_call>" in text and not re.search("<function=|<arg_key>", text):
        return HERMES
    return None


def _shows_tools(text: str) -> bool:
    return re.search(r"\btools\b", text) is not None
