"""Input items to chat messages: what stands between two questions is one answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.http.apis.responses.request import (
    AnswerItem,
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    RefusalText,
)
from outrider.gateway.http.apis.responses.tools import chat_name, text_arguments

_Message = dict[str, Any]

_PREVIOUS: Final = "previous_response_id"
_skim: Final = msgspec.json.Decoder(msgspec.Raw).decode


def read_messages(
    instructions: str | None, given: Sequence[Item], earlier: Sequence[Item] = ()
) -> list[_Message]:
    """Return the conversation in the chat format. `earlier`: the stored items in front of it.

    Raises BadRequestError for a call whose arguments are not a JSON object, for a result without
    its call, and for a conversation without a message.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    _add_earlier(conversation, earlier)
    for index, item in enumerate(given):
        conversation.add(item, f"input.{index}")
    messages = conversation.finish()
    if not messages:
        raise BadRequestError("input: it holds no message; give at least one.", param="input")
    return messages


def given_items(given: str | Sequence[Item] | None) -> Sequence[Item]:
    """Return a request's input as items: a text is the user's message."""
    if given is None or isinstance(given, str):
        return [MessageItem(role="user", content=given or "")]
    return given


def foreign_items(given: Sequence[Item]) -> dict[str, str]:
    """Return the paths of the items that are left out, and their types: other servers' calls."""
    return {
        f"input.{index}.type": str(item["type"])
        for index, item in enumerate(given)
        if isinstance(item, dict)
    }


@dataclass(slots=True)
class _Answer:
    """An earlier answer while its items come."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> _Message:
        """The assistant's message."""
        text = "\n".join(self.texts)
        message: _Message = {"role": "assistant", "content": text}
        if self.calls:
            message |= {"content": text or None, "tool_calls": self.calls}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        return message


class _Conversation:
    """Takes items in order. `messages` holds what is complete."""

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self._answer: _Answer | None = None
        self._call_ids: set[str] = set()

    def add(self, item: Item, path: str) -> None:
        """The next item; `path` leads to it."""
        match item:
            case MessageItem():
                self._close()
                self.messages.append({"role": item.role, "content": _joined(item.content)})
            case FunctionOutputItem():
                self._add_output(item, path)
            case AnswerItem():
                self._open_turn().texts.append(_joined(item.content))
            case FunctionCallItem():
                _check_arguments(item.arguments, f"{path}.arguments")
                self._add_call(item, item.arguments)
            case CustomCallItem():
                self._add_call(item, text_arguments(item.input))
            case ReasoningItem():
                self._open_turn().thoughts += _thoughts(item)

    def finish(self) -> list[_Message]:
        """All messages."""
        self._close()
        return self.messages

    def _open(self) -> _Answer:
        if self._answer is None:
            self._answer = _Answer()
        return self._answer

    def _open_turn(self) -> _Answer:
        """Return the open answer; an answer with text but without calls is closed first."""
        if self._answer is not None and self._answer.texts and not self._answer.calls:
            self._close()
        return self._open()

    def _close(self) -> None:
        """An answer of which nothing can be read leaves nothing."""
        answer, self._answer = self._answer, None
        if answer is not None and (answer.thoughts or answer.texts or answer.calls):
            self.messages.append(answer.message())

    def _add_call(self, item: FunctionCallItem | CustomCallItem, arguments: str) -> None:
        self._call_ids.add(item.call_id)
        function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._open().calls.append(call)

    def _add_output(self, item: FunctionOutputItem, path: str) -> None:
        if item.call_id not in self._call_ids:
            raise BadRequestError(
                f"{path}.call_id: no tool call with this id comes before it.",
                param=f"{path}.call_id",
            )
        self._close()
        content = _joined(item.output)
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _add_earlier(conversation: _Conversation, earlier: Sequence[Item]) -> None:
    """Add the items of a stored conversation. Raises BadRequestError: a cut call cannot go on."""
    for item in earlier:
        try:
            conversation.add(item, _PREVIOUS)
        except BadRequestError as error:
            raise BadRequestError(
                f"{error} The stored conversation cannot go on.", param=_PREVIOUS
            ) from None


def _joined(content: str | Sequence[InputText | OutputText | RefusalText]) -> str:
    """One text; parts are joined by line feeds, as in chat."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part.refusal if isinstance(part, RefusalText) else part.text for part in content
    )


def _thoughts(item: ReasoningItem) -> list[str]:
    """The thoughts themselves where they are there, else their summary."""
    parts = item.content or item.summary or []
    return [part.text for part in parts if part.text]


def _check_arguments(text: str, path: str) -> None:
    """Read over the arguments without building their values: no bound counts what a text holds."""
    begun = text.lstrip(" \t\r\n")
    try:
        is_object = not begun or bytes(memoryview(_skim(begun))[:1]) == b"{"
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{path}: not valid JSON: {error}.", param=path) from None
    if not is_object:
        raise BadRequestError(f"{path}: not a JSON object.", param=path)
