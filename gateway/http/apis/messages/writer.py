"""Chat answers in the words of the Messages API: a message, or the events of its stream."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.http.apis.chat_chunks import (
    CallPiece,
    ChatChunkParser,
    ChatPiece,
    ChatUsage,
    read_completion,
)
from outrider.gateway.http.apis.events import named_event, one_line
from outrider.gateway.http.apis.messages.problems import problem_object
from outrider.gateway.upstream.dialects.anthropic_words import STOP_REASONS

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.decode

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
# Thoughts that are not shown are silence; some clients take a long one for a lost connection.
_HIDDEN_PER_PING: Final = 32

_Fields = dict[str, Any]


class MessageWriter:
    """Writes one answer. `shows_thinking`: thoughts are shown."""

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
        blocks = [*self._thought_blocks(piece), *_text_blocks(piece), *_call_blocks(piece.calls)]
        message: _Fields = {
            **_head(piece),
            "content": blocks or [_text_block("")],
            "stop_reason": _stop_reason(
                piece.finish_reason, piece.stop, has_calls=bool(piece.calls)
            ),
            "stop_sequence": piece.stop,
            "usage": _usage(piece.usage or ChatUsage()) | _service_tier(piece),
        }
        if piece.report is not None:
            message["outrider"] = piece.report
        return _encode(message)

    def ending_badly(self, problem: Problem, delivered: Mapping[str, Any] | None) -> bytes:
        """An error event; nothing follows it."""
        document = problem_object(problem)
        if delivered is not None:
            document["outrider"] = delivered
        return named_event("error", document)

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
            out += self._in_block("text", _text_block("")) + _text_delta(self._last, text)
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
        """Return the first event; the number of prompt tokens follows at the end of the stream."""
        self._has_begun = True
        message: _Fields = {
            **_head(piece),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(ChatUsage()) | _service_tier(piece),
        }
        return named_event("message_start", {"type": "message_start", "message": message}) + PING

    def _in_block(self, kind: str, block: _Fields) -> bytes:
        """Go on in the open block where it is of this kind, else end it and begin another."""
        return b"" if self._open == kind else self._new_block(kind, block)

    def _new_block(self, kind: str, block: _Fields) -> bytes:
        before = self._close()
        self._open = kind
        self._num_blocks += 1
        begun = {"type": "content_block_start", "index": self._last, "content_block": block}
        return before + named_event("content_block_start", begun)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = self._call_index = None
        return named_event(
            "content_block_stop", {"type": "content_block_stop", "index": self._last}
        )

    def _thought(self, text: str) -> bytes:
        if not self._tells_thoughts:
            self._num_hidden += 1
            return PING if self._num_hidden % _HIDDEN_PER_PING == 0 else b""
        return self._in_block("thinking", _thinking_block("")) + self._delta(
            {"type": "thinking_delta", "thinking": text}
        )

    def _signed(self, thought: Mapping[str, Any]) -> bytes:
        """A thought of an upstream tier that is whole: its text was told before, if at all."""
        if thought.get("type") != "thinking":
            return self._new_block("redacted_thinking", dict(thought)) + self._close()
        out = self._in_block("thinking", _thinking_block(""))
        signature = {"type": "signature_delta", "signature": thought.get("signature") or ""}
        return out + self._delta(signature) + self._close()

    def _call(self, call: CallPiece) -> bytes:
        """Raise GenerationError for a call that goes on after its block, or has no name."""
        out = b""
        if self._open != "tool_use" or call.index != self._call_index:
            if not call.name:
                raise GenerationError(
                    "The model's server sent a part of a call out of turn.",
                    code="unreadable_answer",
                )
            out = self._new_block("tool_use", _call_block(call.call_id, call.name, {}))
            self._call_index = call.index
            self._has_calls = True
        if call.arguments:
            out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return out

    def _delta(self, delta: _Fields) -> bytes:
        document = {"type": "content_block_delta", "index": self._last, "delta": delta}
        return named_event("content_block_delta", document)

    def _ending(self) -> bytes:
        out = b"" if self._has_begun else self._begin(ChatPiece())
        if self._num_blocks == 0:
            out += self._new_block("text", _text_block(""))
        out += self._close()
        reason = _stop_reason(self._finish_reason, self._stop, has_calls=self._has_calls)
        document: _Fields = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": self._stop},
            "usage": _usage(self._usage),
        }
        if self._report is not None:
            document["outrider"] = self._report
        out += named_event("message_delta", document)
        return out + named_event("message_stop", {"type": "message_stop"})

    def _thought_blocks(self, piece: ChatPiece) -> list[_Fields]:
        """Thoughts of an upstream tier with their signatures; local ones have none."""
        if not piece.thoughts:
            shown = self._tells_thoughts and piece.reasoning
            return [_thinking_block(piece.reasoning)] if shown else []
        blocks = [dict(thought) for thought in piece.thoughts]
        if not self._tells_thoughts:
            blocks = [
                block | {"thinking": ""} if block.get("type") == "thinking" else block
                for block in blocks
            ]
        return blocks


def _head(piece: ChatPiece) -> _Fields:
    """Return the fields that a message has from its beginning on."""
    answer_id = piece.answer_id.removeprefix("chatcmpl-")
    return {
        "id": answer_id if answer_id.startswith("msg_") else f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": piece.model,
    }


def _text_delta(index: int, text: str) -> bytes:
    """The event that there is most of."""
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % index
        + b'"delta":{"type":"text_delta","text":'
        + one_line(text)
        + b"}}\n\n"
    )


def _text_block(text: str) -> _Fields:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> _Fields:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call_block(call_id: str, name: str, arguments: _Fields) -> _Fields:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _text_blocks(piece: ChatPiece) -> list[_Fields]:
    text = piece.content or piece.refusal
    return [_text_block(text)] if text else []


def _call_blocks(calls: Sequence[CallPiece]) -> list[_Fields]:
    """A call that max_tokens has cut off is left out: it could not be run."""
    blocks = []
    for call in calls:
        try:
            arguments = _decode(call.arguments or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            blocks.append(_call_block(call.call_id, call.name, arguments))
    return blocks


def _stop_reason(finish_reason: str | None, stop: str | None, *, has_calls: bool) -> str:
    """Return the stop reason; OpenAI reports "stop" for a forced tool call, here it is tool_use."""
    if finish_reason == "stop" and has_calls:
        return "tool_use"
    if finish_reason == "stop" and stop is not None:
        return "stop_sequence"
    return STOP_REASONS.get(finish_reason or "stop", "end_turn")


def _usage(usage: ChatUsage) -> _Fields:
    """Tokens read from the cache are counted apart here."""
    num_cached = min(usage.num_cached_tokens, usage.num_prompt_tokens)
    return {
        "input_tokens": usage.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def _service_tier(piece: ChatPiece) -> _Fields:
    return {"service_tier": "priority" if piece.service_tier == "priority" else "standard"}
