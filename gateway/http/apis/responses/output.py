"""The items of a response's output, made of the pieces of a chat answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.http.apis.chat_chunks import CallPiece, ChatPiece
from outrider.gateway.http.apis.responses.event_log import EventSink, delta_head
from outrider.gateway.http.apis.responses.fields import ItemStatus
from outrider.gateway.http.apis.responses.tools import OfferedTool, text_of

_Logprobs = Sequence[dict[str, Any]] | None
_Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Format of an item with one part of text.

    `field` holds the text in the part and in the event that ends it; `index` is the name of the
    part's index field, which is always 0.
    """

    prefix: str
    part: str
    field: str
    index: str
    part_event: str
    text_event: str
    has_logprobs: bool = False

    def part_fields(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> _Fields:
        """The part."""
        fields: _Fields = {"type": self.part, self.field: text}
        if self.has_logprobs:
            fields |= {"annotations": [], "logprobs": list(logprobs)}
        return fields


_THOUGHT: Final = _Kind(
    prefix="rs",
    part="summary_text",
    field="text",
    index="summary_index",
    part_event="response.reasoning_summary_part",
    text_event="response.reasoning_summary_text",
)
_TEXT: Final = _Kind(
    prefix="msg",
    part="output_text",
    field="text",
    index="content_index",
    part_event="response.content_part",
    text_event="response.output_text",
    has_logprobs=True,
)
_REFUSAL: Final = _Kind(
    prefix="msg",
    part="refusal",
    field="refusal",
    index="content_index",
    part_event="response.content_part",
    text_event="response.refusal",
)


class _TextItem:
    """Thinking, or a message. Both have one part."""

    def __init__(self, kind: _Kind, place: int, tail: str, events: EventSink) -> None:
        self.kind = kind
        self.place = place
        self.status: ItemStatus = "in_progress"
        self._id = f"{kind.prefix}_{tail}_{place}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._events = events
        self._where = {"item_id": self._id, "output_index": place, kind.index: 0}
        self._head = delta_head(f"{kind.text_event}.delta", self._where)
        events.add("response.output_item.added", {"output_index": place, "item": self._item([])})
        events.add(f"{kind.part_event}.added", {**self._where, "part": kind.part_fields("")})

    def add(self, text: str, logprobs: _Logprobs, trace: bytes | None) -> None:
        """More of the text."""
        self._texts.append(text)
        told: _Logprobs = None
        if self.kind.has_logprobs:
            told = logprobs or ()
            self._logprobs += told
        self._events.add_delta(self._head, text, logprobs=told, trace=trace)

    def close(self, status: ItemStatus) -> None:
        """Nothing more comes."""
        self.status = status
        kind, part = self.kind, self._part()
        done: _Fields = {**self._where, kind.field: part[kind.field]}
        if kind.has_logprobs:
            done["logprobs"] = self._logprobs
        self._events.add(f"{kind.text_event}.done", done)
        self._events.add(f"{kind.part_event}.done", {**self._where, "part": part})
        fields = {"output_index": self.place, "item": self.item()}
        self._events.add("response.output_item.done", fields)

    def item(self) -> _Fields:
        """The item as it is now."""
        return self._item([self._part()])

    def _part(self) -> _Fields:
        return self.kind.part_fields("".join(self._texts), self._logprobs)

    def _item(self, parts: list[_Fields]) -> _Fields:
        if self.kind is _THOUGHT:
            return {"type": "reasoning", "id": self._id, "summary": parts, "status": self.status}
        return {
            "type": "message",
            "id": self._id,
            "status": self.status,
            "role": "assistant",
            "content": parts,
        }


class _CallItem:
    """A call of a function, or with `tool` of one in a namespace."""

    prefix = "fc"
    delta_event = "response.function_call_arguments.delta"

    def __init__(
        self, first: CallPiece, tool: OfferedTool | None, place: int, tail: str, events: EventSink
    ) -> None:
        self.place = place
        self.status: ItemStatus = "in_progress"
        self._id = f"{self.prefix}_{tail}_{place}"
        self._call_id = first.call_id or f"call_{tail}_{place}"
        self._name = first.name if tool is None else tool.name
        self._namespace = (
            {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
        )
        self._arguments: list[str] = []
        self._events = events
        self._where = {"item_id": self._id, "output_index": place}
        self._head = delta_head(self.delta_event, self._where)
        events.add("response.output_item.added", {"output_index": place, "item": self.item()})

    @property
    def is_whole(self) -> bool:
        """True if the arguments are valid JSON: then they are complete."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def add(self, arguments: str, trace: bytes | None) -> None:
        """More of the arguments. Raises GenerationError where they were complete."""
        if not arguments:
            return
        if self.status != "in_progress":
            if arguments.isspace():
                return
            raise GenerationError(
                "The model's server went on with a call that was complete.",
                code="unreadable_answer",
            )
        self._arguments.append(arguments)
        self._emit(arguments, trace)

    def _emit(self, arguments: str, trace: bytes | None) -> None:
        self._events.add_delta(self._head, arguments, logprobs=None, trace=trace)

    def close(self, status: ItemStatus) -> None:
        """Nothing more comes."""
        self.status = status
        self._emit_all()
        fields = {"output_index": self.place, "item": self.item()}
        self._events.add("response.output_item.done", fields)

    def _emit_all(self) -> None:
        done = {**self._where, "arguments": "".join(self._arguments)}
        self._events.add("response.function_call_arguments.done", done)

    def item(self) -> _Fields:
        """The item as it is now."""
        return self._head_fields("function_call") | {"arguments": "".join(self._arguments)}

    def _head_fields(self, kind: str) -> _Fields:
        return {
            "type": kind,
            "id": self._id,
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
        }


class _CustomCallItem(_CallItem):
    """A call of a custom tool: its text is known once the arguments that hold it are whole."""

    prefix = "ctc"
    delta_event = "response.custom_tool_call_input.delta"

    def _emit(self, arguments: str, trace: bytes | None) -> None:
        """Keep the text until all of it is there."""

    def _emit_all(self) -> None:
        text = text_of("".join(self._arguments))
        self._events.add_delta(self._head, text, logprobs=None, trace=None)
        done = {**self._where, "input": text}
        self._events.add("response.custom_tool_call_input.done", done)

    def item(self) -> _Fields:
        """The item as it is now."""
        return self._head_fields("custom_tool_call") | {"input": text_of("".join(self._arguments))}


class Output:
    """The items so far. Use `add` for each piece, then `close`.

    `tail` makes the items' ids; `tools`: those that may be called, by their names in the chat. One
    text is open at a time; a call stays open behind the next one's beginning while its arguments
    are not whole, as servers may write several calls in turn.
    """

    def __init__(self, tail: str, events: EventSink, tools: Mapping[str, OfferedTool]) -> None:
        self.tail = tail
        self._tools = tools
        self._events = events
        self._items: list[_TextItem | _CallItem] = []
        self._text: _TextItem | None = None
        self._calls: dict[int, _CallItem] = {}
        self._early_logprobs: list[dict[str, Any]] = []

    def add(self, piece: ChatPiece, trace: bytes | None = None) -> None:
        """Write the events of a piece. Raises GenerationError for an invalid call."""
        if piece.reasoning:
            self._open(_THOUGHT).add(piece.reasoning, None, trace)
        if piece.content:
            logprobs = [*self._early_logprobs, *(piece.logprobs or ())]
            self._early_logprobs.clear()
            self._open(_TEXT).add(piece.content, logprobs, trace)
        elif piece.logprobs and not piece.calls:
            self._early_logprobs += piece.logprobs  # a character is not whole yet
        if piece.refusal:
            self._open(_REFUSAL).add(piece.refusal, None, trace)
        for call in piece.calls:
            self._call(call).add(call.arguments, trace)

    def close(self, *, is_cut: bool) -> None:
        """The answer is over; `is_cut`: what came last is not complete.

        Where nothing was said, the output is an empty message.
        """
        if not self._items:
            self._open(_TEXT)
        last = self._items[-1]
        for item in self._items:
            if item.status == "in_progress":
                item.close("incomplete" if is_cut and item is last else "completed")

    def items(self, *, is_broken: bool = False) -> list[_Fields]:
        """The items as JSON; `is_broken`: those that are open will not be completed."""
        written = [item.item() for item in self._items]
        if is_broken:
            for item in written:
                if item["status"] == "in_progress":
                    item["status"] = "incomplete"
        return written

    def _open(self, kind: _Kind) -> _TextItem:
        """The open text of this kind."""
        if self._text is not None and self._text.kind is kind:
            return self._text
        self._close_text()
        self._close_whole_calls()
        self._text = _TextItem(kind, len(self._items), self.tail, self._events)
        self._items.append(self._text)
        return self._text

    def _close_text(self) -> None:
        if self._text is not None:
            self._text.close("completed")
            self._text = None

    def _call(self, piece: CallPiece) -> _CallItem:
        """The call of this piece's index."""
        call = self._calls.get(piece.index)
        if call is not None:
            return call
        if not piece.name:
            raise GenerationError(
                "The model's server sent a call without a name.", code="unreadable_answer"
            )
        self._close_text()
        self._close_whole_calls()
        tool = self._tools.get(piece.name)
        kind = _CustomCallItem if tool is not None and tool.kind == "custom" else _CallItem
        call = kind(piece, tool, len(self._items), self.tail, self._events)
        self._items.append(call)
        self._calls[piece.index] = call
        return call

    def _close_whole_calls(self) -> None:
        for call in self._calls.values():
            if call.status == "in_progress" and call.is_whole:
                call.close("completed")
