"""Tool calls and thinking of an answer, against those that its tokens are read as.

A client has calls as the gateway wrote them anew, a name and arguments as JSON, and thinking
without its marks. So the tokens are read as they were when the answer was written, and both sides
are compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.gateway.answering.jobs.functions import with_tools
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import ReasoningFormat
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.http.apis.verify.given import GivenAnswer, bare

Call = tuple[str, str]
"""The function's name, and its arguments as they stand in the answer."""
_MOST_OPENING_TOKENS: Final = 32
"""Of the end of a prompt, in which a mark that opens thinking stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """What a client gets of an answer's tokens."""

    content: str
    calls: tuple[Call, ...] | None
    """None: no calls were possible, and none are compared."""
    thinking: str
    is_unfinished: bool
    """All is thinking, if the prompt opened it: the answer never ends it."""

    def agrees_with(self, answer: GivenAnswer) -> bool:
        """Return whether this is what an answer's client shows."""
        return (
            self._is_thinking_of(answer)
            and answer.stands_in(self.content)
            and (self.calls is None or _are_same(_calls_of(answer.message or {}), self.calls))
        )

    def _is_thinking_of(self, answer: GivenAnswer) -> bool:
        """Return whether an answer has this thinking, spaces aside, or shows none.

        Only thinking that is shown tells that all of an answer is.
        """
        shown = answer.thinking
        if not shown:
            return not self.is_unfinished
        return all(isinstance(text, str) and bare(text) == bare(self.thinking) for text in shown)


def spellings(answer: GivenAnswer, form: ReasoningFormat) -> tuple[str, ...]:
    """Return the texts that an answer without token ids may have been, the likeliest first.

    Which white space stood around the marks of thinking, and whether the prompt opened it, is not
    told. Raises BadRequestError where its text cannot be had.
    """
    content, shown = answer.text, answer.thinking
    if not shown:
        return (content,)
    thought = shown[0]
    if form.has_channels or not isinstance(thought, str):
        raise answer.without_ids()
    closes = [form.close + gap for gap in ("\n\n", "\n", "")] if content else [""]
    return tuple(
        f"{before}{thought}{after}{content}"
        for before in (f"{form.open}\n", "", "\n", form.open)
        for after in closes
    )


def tool_reading(request: ChatRequest, tokenizer: ChatTokenizer) -> ToolReading | None:
    """Return how a request's answers are read; None where no calls are possible."""
    asked = with_tools(request) if request.uses_functions else request
    plan = plan_tools(asked) if asked.names_tools else None
    return None if plan is None else plan.reading(tokenizer.dialect)


def read_tokens(
    token_ids: Sequence[int],
    tokenizer: ChatTokenizer,
    reading: ToolReading | None,
    prompt_token_ids: Sequence[int] | None = None,
) -> tuple[ReadAnswer, ...]:
    """Read an answer's tokens, behind a prompt that opens no thinking and behind one that does.

    `reading`: of tool calls; None where none are possible. The prompt's tokens may tell which.
    """
    if not tokenizer.may_think:
        return (_read(token_ids, tokenizer, reading, opens_thinking=False),)
    plain, opened = (
        _read(token_ids, tokenizer, reading, opens_thinking=opens) for opens in (False, True)
    )
    if prompt_token_ids is None:
        return plain, opened
    form = tokenizer.reasoning.format
    prompt = tokenizer.decode(prompt_token_ids[-_MOST_OPENING_TOKENS:], with_special=True)
    if not prompt.rstrip().endswith(form.open.rstrip()):
        return (plain,)
    # An earlier answer that is continued may end with a mark that opens nothing.
    return (opened,) if any(mark in plain.content for mark in form.closes) else (plain, opened)


def _read(
    token_ids: Sequence[int],
    tokenizer: ChatTokenizer,
    reading: ToolReading | None,
    *,
    opens_thinking: bool,
) -> ReadAnswer:
    """Read an answer's tokens, without what ends the answer."""
    detokenizer = tokenizer.detokenizer()
    splitter = tokenizer.splitter(opens_thinking=opens_thinking)
    special = {
        **tokenizer.reasoning.special_texts,
        **(reading.special_texts if reading is not None else {}),
    }
    pieces: list[tuple[str, str]] = []
    for token_id in token_ids:
        if token_id in special:
            pieces += splitter.push(detokenizer.flush() + special[token_id])
        elif token_id not in tokenizer.stop_token_ids:
            pieces += splitter.push(detokenizer.push(token_id))
    pieces += splitter.push(detokenizer.flush())
    is_unfinished = opens_thinking and splitter.is_thinking
    pieces += splitter.flush()
    content, calls = _told_apart("".join(t for kind, t in pieces if kind != "reasoning"), reading)
    return ReadAnswer(
        content=content,
        calls=calls,
        thinking="".join(text for kind, text in pieces if kind == "reasoning"),
        is_unfinished=is_unfinished,
    )


def _told_apart(text: str, reading: ToolReading | None) -> tuple[str, tuple[Call, ...] | None]:
    """Tell content from calls."""
    if reading is None:
        return text, None
    parser = ToolParser(reading)
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in [*parser.push(text), *parser.flush()]:
        if piece.kind == "content":
            content.append(piece.text)
        elif piece.kind == "call":
            names.append(piece.text)
            arguments.append([])
        else:
            arguments[-1].append(piece.text)
    return "".join(content), tuple(zip(names, map("".join, arguments), strict=True))


def _calls_of(message: Mapping[str, Any]) -> list[Call]:
    """Return a message's calls; what is none has no name."""
    listed = message.get("tool_calls")
    functions = [
        each.get("function") if isinstance(each, dict) else None
        for each in (listed if isinstance(listed, list) else ())
    ]
    if message.get("function_call") is not None:
        functions.append(message["function_call"])
    return [
        (str(each.get("name")), str(each.get("arguments"))) if isinstance(each, dict) else ("", "")
        for each in functions
    ]


def _are_same(own: Sequence[Call], others: Sequence[Call]) -> bool:
    """Return whether these are the same calls, with the same arguments as JSON."""
    return len(own) == len(others) and all(
        name == other and _arguments(text) == _arguments(written)
        for (name, text), (other, written) in zip(own, others, strict=True)
    )


def _arguments(text: str) -> Any:
    """Return arguments as JSON; as they are where an answer broke off in them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
