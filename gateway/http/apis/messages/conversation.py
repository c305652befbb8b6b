"""Anthropic's turns of content blocks as OpenAI's messages.

The other way round: gateway/upstream/dialects/anthropic_messages.py. Turns of the same role become
one, as the Messages API has it; results of tools become messages of their own, in front of what the
user says with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NoReturn

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.http.apis.messages.schema import (
    AssistantMessageParam,
    Base64Source,
    DocumentBlock,
    FromAssistant,
    ImageBlock,
    MessageParam,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

_BILLING: Final = "x-anthropic-billing-header:"
_PDF: Final = "application/pdf"
_NO_MEDIA: Final = "the models of this machine read text only"

_encode: Final = msgspec.json.Encoder().encode
_Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in OpenAI's words. `is_open`: the last one is the beginning of the answer.

    `billing`: the line for Anthropic's own servers that stood in front of the system's text.
    """

    messages: list[_Fields]
    is_open: bool
    billing: str = ""


def translate_conversation(
    messages: Sequence[MessageParam],
    system: str | Sequence[TextBlock] | None,
    *,
    has_upstream_tiers: bool,
) -> Conversation:
    """Images, files and signed thoughts are kept where an upstream tier may read them.

    Raises BadRequestError with the path of what cannot be said.
    """
    translator = _Translator(has_upstream_tiers, _first_of_tool_loop(messages))
    billing, system = _without_billing(system)
    made = _system(system)
    for role, turn in groupby(enumerate(messages), key=lambda item: item[1].role):
        if role == "system":
            for _, message in turn:
                made += _system(message.content) if isinstance(message, SystemMessage) else []
        elif role == "user":
            made += translator.user([(i, m) for i, m in turn if isinstance(m, UserMessage)])
        else:
            made.append(
                translator.answer([(i, m) for i, m in turn if isinstance(m, AssistantMessageParam)])
            )
    made = made or [{"role": "system", "content": ""}]  # instructions that say nothing
    last = messages[-1]
    is_open = isinstance(last, AssistantMessageParam)
    if is_open:
        _check_open(made[-1], len(messages) - 1)
    return Conversation(messages=made, is_open=is_open, billing=billing)


def _first_of_tool_loop(messages: Sequence[MessageParam]) -> int:
    """Return the index at which the unfinished answer begins: after the last real user message."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, UserMessage) and not _is_results(message):
            return index + 1
    return 0


def _is_results(message: UserMessage) -> bool:
    content = message.content
    return not isinstance(content, str) and any(
        isinstance(block, ToolResultBlock) for block in content
    )


def _without_billing(
    system: str | Sequence[TextBlock] | None,
) -> tuple[str, str | Sequence[TextBlock] | None]:
    """Return Claude Code's first line, which differs in each request, and the text without it.

    With it in the prompt nothing behind it would be found in a prefix cache.
    """
    first = system if isinstance(system, str) else system[0].text if system else ""
    if not first.startswith(_BILLING):
        return "", system
    line, _, rest = first.partition("\n")
    if system is None or isinstance(system, str):
        return line, rest
    return line, [system[0].model_copy(update={"text": rest}), *system[1:]]


def _system(content: str | Sequence[TextBlock] | None) -> list[_Fields]:
    """An instruction; none where it says nothing."""
    if content is None:
        return []
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    parts = [_text_part(text) for text in texts if text]
    return [{"role": "system", "content": _content(parts)}] if parts else []


def _check_open(message: _Fields, index: int) -> None:
    """Raises BadRequestError for an answer that cannot go on: it needs text behind all else."""
    path = f"messages.{index}.content"
    if message.get("tool_calls"):
        _refuse(path, "the last message calls tools; their results have to follow")
    if not message["content"]:
        _refuse(path, "the last message is the assistant's and has no text to go on with")


class _Translator:
    """Translates turns. `first_of_loop`: from this message on, signed thoughts have to go back."""

    def __init__(self, has_upstream_tiers: bool, first_of_loop: int) -> None:
        self._takes_media = has_upstream_tiers
        self._takes_thoughts = has_upstream_tiers
        self._first_of_loop = first_of_loop

    def user(self, turn: Iterable[tuple[int, UserMessage]]) -> list[_Fields]:
        """Results of tools, then what the user says."""
        results: list[_Fields] = []
        said: list[_Fields] = []
        for index, message in turn:
            if isinstance(message.content, str):
                said += [_text_part(message.content)] if message.content else []
                continue
            for place, block in enumerate(message.content):
                path = f"messages.{index}.content.{place}"
                if isinstance(block, ToolResultBlock):
                    results.append(self._result(block, path))
                else:
                    said += self._part(block, path)
        if said or not results:
            results.append({"role": "user", "content": _content(said)})
        return results

    def answer(self, turn: Iterable[tuple[int, AssistantMessageParam]]) -> _Fields:
        """An earlier answer."""
        texts: list[str] = []
        blocks: list[tuple[int, FromAssistant]] = []
        for index, message in turn:
            if isinstance(message.content, str):
                texts.append(message.content)
            else:
                blocks += [(index, block) for block in message.content]
                texts += [block.text for block in message.content if isinstance(block, TextBlock)]
        thought = "".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
        calls = [_call(block) for _, block in blocks if isinstance(block, ToolUseBlock)]
        signed = [
            block.model_dump()
            for index, block in blocks
            if index >= self._first_of_loop
            and isinstance(block, ThinkingBlock | RedactedThinkingBlock)
            and _is_signed(block)
        ]
        fields: _Fields = {
            "role": "assistant",
            "content": "".join(texts) or (None if calls else ""),
        }
        if thought:
            fields["reasoning_content"] = thought
        if signed and self._takes_thoughts:
            fields["thinking_blocks"] = signed
        if calls:
            fields["tool_calls"] = calls
        return fields

    def _result(self, block: ToolResultBlock, path: str) -> _Fields:
        content = block.content
        if content is None or isinstance(content, str):
            parts = [_text_part(content)] if content else []
        else:
            parts = [
                part
                for index, inner in enumerate(content)
                for part in self._part(inner, f"{path}.content.{index}")
            ]
        if block.is_error:
            parts.insert(0, _text_part("Error:"))
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(parts)}

    def _part(self, block: TextBlock | ImageBlock | DocumentBlock, path: str) -> list[_Fields]:
        """One part, or two of a document with a title; none of an empty text."""
        if isinstance(block, TextBlock):
            return [_text_part(block.text)] if block.text else []
        if isinstance(block, DocumentBlock) and isinstance(block.source, TextSource):
            texts = (block.title, block.context, block.source.data)
            return [_text_part(text) for text in texts if text]
        if not self._takes_media:
            _refuse(f"{path}.type", f"{block.type!r} is not supported: {_NO_MEDIA}")
        if isinstance(block, ImageBlock):
            url = _data_url(block.source) if block.source.type == "base64" else block.source.url
            return [{"type": "image_url", "image_url": {"url": url}}]
        return [_file_part(block, path)]


def _text_part(text: str) -> _Fields:
    return {"type": "text", "text": text}


def _content(parts: list[_Fields]) -> str | list[_Fields]:
    """A single text without its wrapping."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _is_signed(block: ThinkingBlock | RedactedThinkingBlock) -> bool:
    """Return whether a thinking block is another server's: local ones have no signature."""
    return isinstance(block, RedactedThinkingBlock) or bool(block.signature)


def _call(block: ToolUseBlock) -> _Fields:
    arguments = _encode(block.input).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _file_part(block: DocumentBlock, path: str) -> _Fields:
    source = block.source
    assert isinstance(source, Base64Source), "plain text is a part of its own"
    if source.media_type != _PDF:
        _refuse(f"{path}.source.media_type", f"{source.media_type!r} is not supported, only {_PDF}")
    file = {"filename": block.title or "document.pdf", "file_data": _data_url(source)}
    return {"type": "file", "file": file}


def _data_url(source: Base64Source) -> str:
    return f"data:{source.media_type};base64,{source.data}"


def _refuse(path: str, reason: str) -> NoReturn:
    raise BadRequestError(f"{path}: {reason}.", param=path)
