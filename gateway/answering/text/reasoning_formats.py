"""The marks between which model families write their reasoning, and those that a template knows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

TextKind = Literal["reasoning", "content"]
# The block before the answer: the prompt opened it, the model may open it, or there is none.
Thinking = Literal["open", "possible", "none"]
ReasoningFormatName = Literal[
    "think", "granite", "response", "cohere", "mistral", "gemma", "harmony"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """An answer: `open THOUGHT close answer_open ANSWER answer_close`, all but ANSWER optional."""

    name: ReasoningFormatName
    open: str
    close: str
    answer_open: str = ""
    answer_close: str = ""
    short_open: str = ""
    """A spelling of `open` that some answers have instead."""
    short_close: str = ""
    """A spelling of `close` that some answers have instead."""
    are_tokens: bool = False
    """The marks are tokens of their own, so that no answer merely mentions one."""
    has_channels: bool = False
    """The answer is a list of messages with headers (gateway/answering/text/channels.py)."""
    stops: tuple[str, ...] = ()
    """Tokens that end an answer, beside those that the checkpoint names."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks in front of a thought."""
        return (self.open, self.short_open) if self.short_open else (self.open,)

    @property
    def closes(self) -> tuple[str, ...]:
        """The marks behind a thought."""
        return (self.close, self.short_close) if self.short_close else (self.close,)

    @property
    def marks(self) -> str:
        """The format's texts, in which special tokens may stand."""
        channels = CHANNEL_MARKS if self.has_channels else ()
        parts = (self.open, self.close, self.answer_open, self.answer_close, *channels)
        return "\n".join(parts)


CHANNEL_MARKS: Final = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)

THINK: Final = ReasoningFormat(name="think", open="<think>", close="</think>")
GRANITE: Final = ReasoningFormat(
    name="granite",
    open="Here is my thought process:",
    close="Here is my response:",
    short_open="Here's my thought process:",
    short_close="Here's my response:",
)
RESPONSE: Final = replace(
    THINK, name="response", answer_open="<response>", answer_close="</response>"
)
COHERE: Final = ReasoningFormat(
    name="cohere",
    open="<|START_THINKING|>",
    close="<|END_THINKING|>",
    answer_open="<|START_RESPONSE|>",
    answer_close="<|END_RESPONSE|>",
    are_tokens=True,
)
MISTRAL: Final = ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]", are_tokens=True)
GEMMA: Final = ReasoningFormat(
    name="gemma", open="<|channel>thought\n", close="<channel|>", are_tokens=True
)
HARMONY: Final = ReasoningFormat(
    name="harmony",
    open="<|channel|>analysis<|message|>",
    close="<|end|>",
    are_tokens=True,
    has_channels=True,
    stops=("<|return|>", "<|call|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDialect:
    """The form in which one model writes its reasoning."""

    format: ReasoningFormat = THINK
    is_known: bool = False
    """Its template knows reasoning. Where it does not, marks are recognised all the same, as many
    templates leave them out."""
    special_ids: Mapping[str, int]
    """The special tokens in the format's texts."""

    @property
    def has_special_marks(self) -> bool:
        """True if the marks around answers are special tokens, which no free text holds."""
        return self.format.answer_open in self.special_ids

    @property
    def special_texts(self) -> dict[int, str]:
        """Texts of special tokens by id; a detokenizer leaves them out."""
        return {token_id: text for text, token_id in self.special_ids.items()}


PLAIN: Final = ReasoningDialect(special_ids={})
"""The dialect of a template that knows no reasoning."""


def find_reasoning(template: Any, special_ids: Mapping[str, int]) -> ReasoningDialect:
    """Return the dialect of a chat template. `special_ids`: all special tokens by text."""
    text = str(template or "")
    form = _template_format(text)
    marks = (form or THINK).marks
    found = {mark: token_id for mark, token_id in special_ids.items() if mark in marks}
    return ReasoningDialect(format=form or THINK, is_known=form is not None, special_ids=found)


def _template_format(text: str) -> ReasoningFormat | None:
    for mark, form in _TOLD_BY:
        if mark in text:
            return form
    return None


_TOLD_BY: Final = (
    ("<|channel|>analysis", HARMONY),
    ("<|channel>thought", GEMMA),
    ("<|START_TEXT|>", replace(COHERE, answer_open="<|START_TEXT|>", answer_close="<|END_TEXT|>")),
    (COHERE.open, COHERE),
    (MISTRAL.open, MISTRAL),
    (GRANITE.open, GRANITE),
    ("<seed:think>", replace(THINK, open="<seed:think>", close="</seed:think>")),
    (RESPONSE.answer_open, RESPONSE),
    (THINK.open, THINK),
)
"""Texts in a template that tell how its model reasons; the first that is there."""


def thinking_variables(
    variables: dict[str, Any], template: Any, dialect: ReasoningDialect
) -> dict[str, Any]:
    """Return a template's variables with `enable_thinking` under the names that it knows.

    Granite and DeepSeek have `thinking`, Cohere `reasoning`; gpt-oss always thinks, less or more.
    """
    is_on = variables.get("enable_thinking")
    if not isinstance(is_on, bool) or "enable_thinking" in str(template):
        return variables
    if dialect.format.has_channels:
        return {"reasoning_effort": "medium" if is_on else "low", **variables}
    return {"thinking": is_on, "reasoning": is_on, **variables}
