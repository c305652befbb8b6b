"""Chat answers in the words of the Messages API: a message, or the events of its stream."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.http.apis.api import EVENT_STREAM
from outrider.gateway.http.apis.chat_chunks import (
    CallPiece,
    ChatChunkParser,
    ChatPiece,
    ChatUsage,
    read_completion,
)
from outrider.gateway.http.apis.events import named_event, one_line
from outrider.gateway.http.apis.messages import answers
from outrider.gateway.http.apis.messages.problems import error_detail
from outrider.gateway.upstream.dialects.anthropic_words import STOP_REASONS, MessageStopReason

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.decode

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
# Thoughts that are not shown are silence; some clients take a long one for a lost connection.
_HIDDEN_PER_PING: Final = 32
_EMPTY_TEXT: Final = answers.AnswerText("text", "")
_EMPTY_THOUGHT: Final = answers.AnswerThinking("thinking", "", "")


class MessageWriter:
    """Writes one answer. `shows_thinking`: thoughts are shown."""

    media_type: Final = EVENT_STREAM

    def __init__(self, *, shows_thinking: bool) -> None:
        self._tells_thoughts = shows_thinking
        self._reader = ChatChunkParser()
        self._has_begun = False
        self._open: str | None = None  # the type of the block that is being written
        self._num_blocks = 0
        self._call_index: int | None = None
        self._num_hidden = 0
        self._has_calls = False
        self._finish_reason: str | None = None
        self._stop: str | None = None
        self._usage = ChatUsage()
        self._report: msgspec.Raw | None = None

    def part(self, part: bytes) -> bytes:
        """Whole events of a chat's stream as this API's. Raises GenerationError.

        This runs for each token of each client.
        """
        return b"".join([self._written(piece) for piece in self._reader.read(part)])

    def whole(self, body: bytes) -> bytes:
        """A chat completion as a message."""
        piece = read_completion(body)
        text = piece.content or piece.refusal
        texts = [answers.AnswerText("text", text)] if text else []
        message = answers.MessageAnswer(
            id=_message_id(piece),
            type="message",
            role="assistant",
            model=piece.model,
            content=[*self._thought_blocks(piece), *texts, *_call_blocks(piece.calls)]
            or [_EMPTY_TEXT],
            stop_reason=_stop_reason(piece.finish_reason, piece.stop, has_calls=bool(piece.calls)),
            stop_sequence=piece.stop,
            usage=_message_usage(piece, piece.usage),
            outrider=piece.report,
        )
        return _encode(message)

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """An error event; nothing follows it."""
        return _event(
            answers.MessagesErrorEvent(
                type="error", error=error_detail(problem), outrider=delivered
            )
        )

    def _written(self, piece: ChatPiece) -> bytes:
        if piece.comment:
            return PING
        if piece.is_done:
            return self._ending()
        self._remember(piece)
        out = b"" if self._has_begun else self._begin(piece)
        if piece.reasoning:
            out += self._thought(piece.reasoning)
        if piece.thoughts:
            out += b"".join(map(self._signed, piece.thoughts))
        if text := piece.content or piece.refusal:
            out += self._in_block(_EMPTY_TEXT) + _text_delta(self._last, text)
        if piece.calls:
            out += b"".join(map(self._call, piece.calls))
        return out

    def _remember(self, piece: ChatPiece) -> None:
        """Keep the parts that the last events report."""
        if piece.finish_reason is not None:
            self._finish_reason, self._stop = piece.finish_reason, piece.stop
        if piece.usage is not None:
            self._usage = piece.usage
        if piece.report is not None:
            self._report = piece.report

    @property
    def _last(self) -> int:
        """The index of the block that is being written."""
        return self._num_blocks - 1

    def _begin(self, piece: ChatPiece) -> bytes:
        """Return the first event, with the prompt's tokens where the model's server tells them."""
        self._has_begun = True
        message = answers.BegunMessage(
            id=_message_id(piece),
            type="message",
            role="assistant",
            model=piece.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_message_usage(piece, self._usage),
        )
        return _event(answers.MessageStart("message_start", message)) + PING

    def _in_block(self, block: answers.AnswerText | answers.AnswerThinking) -> bytes:
        """Go on in the open block where it is of this type, else end it and begin another."""
        return b"" if self._open == block.type else self._new_block(block.type, block)

    def _new_block(self, kind: str, block: answers.AnswerBlock) -> bytes:
        before = self._close()
        self._open = kind
        self._num_blocks += 1
        return before + _event(answers.BlockStart("content_block_start", self._last, block))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = self._call_index = None
        return _event(answers.BlockStop("content_block_stop", self._last))

    def _thought(self, text: str) -> bytes:
        if not self._tells_thoughts:
            self._num_hidden += 1
            return PING if self._num_hidden % _HIDDEN_PER_PING == 0 else b""
        return self._in_block(_EMPTY_THOUGHT) + self._delta(
            answers.ThinkingDelta("thinking_delta", text)
        )

    def _signed(self, thought: Mapping[str, Any]) -> bytes:
        """A thought of an upstream tier that is whole: its text was told before, if at all."""
        if thought.get("type") != "thinking":
            hidden = cast(answers.AnswerRedactedThinking, thought)  # passed on as it came
            return self._new_block("redacted_thinking", hidden) + self._close()
        signature = answers.SignatureDelta("signature_delta", thought.get("signature") or "")
        return self._in_block(_EMPTY_THOUGHT) + self._delta(signature) + self._close()

    def _call(self, call: CallPiece) -> bytes:
        """Raise GenerationError for a call that goes on after its block, or has no name."""
        out = b""
        if self._open != "tool_use" or call.index != self._call_index:
            if not call.name:
                raise GenerationError(
                    "The model's server sent a part of a call out of turn.",
                    code="unreadable_answer",
                )
            block = answers.AnswerToolUse("tool_use", call.call_id, call.name, {})
            out = self._new_block("tool_use", block)
            self._call_index = call.index
            self._has_calls = True
        if call.arguments:
            out += self._delta(answers.InputJsonDelta("input_json_delta", call.arguments))
        return out

    def _delta(
        self, delta: answers.ThinkingDelta | answers.SignatureDelta | answers.InputJsonDelta
    ) -> bytes:
        return _event(answers.BlockDelta("content_block_delta", self._last, delta))

    def _ending(self) -> bytes:
        out = b"" if self._has_begun else self._begin(ChatPiece())
        if self._num_blocks == 0:
            out += self._new_block("text", _EMPTY_TEXT)
        reason = _stop_reason(self._finish_reason, self._stop, has_calls=self._has_calls)
        end = answers.MessageDelta(
            type="message_delta",
            delta=answers.EndDelta(stop_reason=reason, stop_sequence=self._stop),
            usage=answers.DeltaUsage(*_usage(self._usage)),
            outrider=self._report,
        )
        return out + self._close() + _event(end) + _event(answers.MessageStop("message_stop"))

    def _thought_blocks(self, piece: ChatPiece) -> list[answers.AnswerBlock]:
        """Thoughts of an upstream tier with their signatures; local ones have none."""
        if not piece.thoughts:
            shown = self._tells_thoughts and piece.reasoning
            return [answers.AnswerThinking("thinking", piece.reasoning, "")] if shown else []
        blocks = piece.thoughts
        if not self._tells_thoughts:
            blocks = [
                block | {"thinking": ""} if block.get("type") == "thinking" else block
                for block in blocks
            ]
        return cast(list[answers.AnswerBlock], blocks)  # passed on as they came


def _event(document: answers.MessageEvent) -> bytes:
    return named_event(document.type, document)


def _message_id(piece: ChatPiece) -> str:
    answer_id = piece.answer_id.removeprefix("chatcmpl-")
    return answer_id if answer_id.startswith("msg_") else f"msg_{answer_id}"


def _text_delta(index: int, text: str) -> bytes:
    """The event that there is most of."""
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % index
        + b'"delta":{"type":"text_delta","text":'
        + one_line(text)
        + b"}}\n\n"
    )


def _call_blocks(calls: Sequence[CallPiece]) -> Iterator[answers.AnswerToolUse]:
    """A call that max_tokens has cut off is left out: it could not be run."""
    for call in calls:
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _decode(call.arguments or "{}")
            if isinstance(arguments, dict):
                yield answers.AnswerToolUse("tool_use", call.call_id, call.name, arguments)


def _stop_reason(
    finish_reason: str | None, stop: str | None, *, has_calls: bool
) -> MessageStopReason:
    """Return the stop reason; OpenAI reports "stop" for a forced tool call, here it is tool_use."""
    if finish_reason == "stop" and has_calls:
        return "tool_use"
    if finish_reason == "stop" and stop is not None:
        return "stop_sequence"
    return STOP_REASONS.get(finish_reason or "stop", "end_turn")


def _usage(usage: ChatUsage) -> tuple[int, int, int, int, answers.ThinkingTokens]:
    """Return the fields of DeltaUsage. Tokens read from the cache are counted apart here."""
    num_cached = min(usage.num_cached_tokens, usage.num_prompt_tokens)
    return (
        usage.num_prompt_tokens - num_cached,
        0,
        num_cached,
        usage.num_completion_tokens,
        answers.ThinkingTokens(usage.num_reasoning_tokens),
    )


def _message_usage(piece: ChatPiece, usage: ChatUsage | None) -> answers.MessageUsage:
    return answers.MessageUsage(
        *_usage(usage or ChatUsage()),
        "priority" if piece.service_tier == "priority" else "standard",
    )
