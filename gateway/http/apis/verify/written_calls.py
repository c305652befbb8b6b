"""Tool calls of an answer, against those that its tokens are read as.

A client has calls as the gateway wrote them anew: a name and arguments as JSON. So the tokens are
read as they were when the answer was written, and both sides are compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.answering.jobs.functions import with_tools
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.schema.chat import ChatRequest

Call = tuple[str, str]
"""The function's name, and its arguments as they stand in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """What a client gets of an answer's tokens, thinking aside."""

    content: str
    calls: tuple[Call, ...]

    def has_calls_of(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message has these calls, and their arguments as JSON."""
        own = _calls_of(message)
        return len(own) == len(self.calls) and all(
            name == other and _arguments(text) == _arguments(written)
            for (name, text), (other, written) in zip(own, self.calls, strict=True)
        )


def tool_reading(request: ChatRequest, tokenizer: ChatTokenizer) -> ToolReading | None:
    """Return how a request's answers are read; None where no calls are possible."""
    asked = with_tools(request) if request.uses_functions else request
    plan = plan_tools(asked) if asked.names_tools else None
    return None if plan is None else plan.reading(tokenizer.dialect)


def read_tokens(
    token_ids: Sequence[int], tokenizer: ChatTokenizer, reading: ToolReading
) -> tuple[ReadAnswer, ...]:
    """Read an answer's tokens, behind a prompt that opens thinking and behind one that does not.

    The prompt that opened it is known to have done so where the answer closes it.
    """
    texts = [
        _answer_text(token_ids, tokenizer, reading, opens_thinking=opens_thinking)
        for opens_thinking in ((False, True) if tokenizer.may_think else (False,))
    ]
    return tuple(_read(text, reading) for text in texts if text is not None)


def _answer_text(
    token_ids: Sequence[int],
    tokenizer: ChatTokenizer,
    reading: ToolReading,
    *,
    opens_thinking: bool,
) -> str | None:
    """Return the text of content and calls, without what ends the answer, and without thinking.

    None where thinking that the prompt opened never ends.
    """
    detokenizer = tokenizer.detokenizer()
    splitter = tokenizer.splitter(opens_thinking=opens_thinking)
    special = {**tokenizer.reasoning.special_texts, **reading.special_texts}
    pieces: list[tuple[str, str]] = []
    for token_id in token_ids:
        if token_id in special:
            pieces += splitter.push(detokenizer.flush() + special[token_id])
        elif token_id not in tokenizer.stop_token_ids:
            pieces += splitter.push(detokenizer.push(token_id))
    pieces += splitter.push(detokenizer.flush())
    if opens_thinking and splitter.is_thinking:
        return None
    pieces += splitter.flush()
    return "".join(text for kind, text in pieces if kind != "reasoning")


def _read(text: str, reading: ToolReading) -> ReadAnswer:
    """Tell calls from content."""
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
    calls = zip(names, map("".join, arguments), strict=True)
    return ReadAnswer(content="".join(content), calls=tuple(calls))


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


def _arguments(text: str) -> Any:
    """Return arguments as JSON; as they are where an answer broke off in them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
