"""Answers that are checked on their way: whole ones, and streams window by window.

A stream is read ahead while a check runs beside it. What is read meanwhile is the next window, so a
slow check makes larger windows and not a slower stream. Nothing is sent before its verdict.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import Any, Final

import msgspec

from outrider.gateway.checks.checks import BlockedError, RequestChecks
from outrider.gateway.checks.texts import texts_of
from outrider.gateway.contract.answers.responder import CheckedParts
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.line_ends import escape_line_ends
from outrider.gateway.settings.checks import CheckSettings
from outrider.gateway.upstream.dialects.base import DONE
from outrider.gateway.upstream.event_stream import EventSplitter, event_data
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import usage_object

_MAX_AHEAD: Final = 1024
"""Events that are read before those in front of them have a verdict."""
_MAX_EVENTS: Final = 65_536
"""Events of a stream that is checked as a whole."""
_MAX_SENT_CHARS: Final = 1000
"""Characters of the text in front of a window that its check is told."""
_OF_TOKENS: Final = ("logprobs", "token_ids", "judgements")
_FILTERED: Final = {"logprobs": None, "finish_reason": "content_filter", "stop_reason": None}
_SHARED: Final[Sequence[str]] = (
    "id",
    "object",
    "created",
    "model",
    "service_tier",
    "system_fingerprint",
)
_DONE_EVENT: Final = b"data: " + DONE + b"\n\n"
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


async def checked_whole(
    checks: RequestChecks, answer: CheckedParts, parts: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """Yield the body of an answer that is not streamed, once it is checked."""
    del answer
    async with aclosing(parts):
        body = b"".join([part async for part in parts])
    if not checks.due:
        yield body
        return
    document = _document(body)
    texts = texts_of(_choices(document), "choices")
    told = [{"path": text.path, "text": text.value, "before": ""} for text in texts]
    try:
        found = await checks.judge(checks.due, told)
    except BlockedError:
        _withhold(document)
        found = []
    if found is not None:
        for text, new in zip(texts, found, strict=False):
            text.replace(new)
        _forget_tokens(document)
        body = _encode(document)
    yield body


def checked_stream(
    checks: RequestChecks, answer: CheckedParts, parts: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream, each once its text is checked."""
    return _CheckedStream(checks, answer, parts).parts()


class _Event:
    """One event of a stream."""

    __slots__ = ("choices", "num_chars", "raw", "texts")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        data = event_data(raw)
        choices = _choices(_document(data)) if data and data != DONE else []
        self.texts = [(text.path, text.value) for text in texts_of(choices, "choices")]
        self.num_chars = sum(len(text) for _, text in self.texts)
        self.choices = [(_index(each), bool(each.get("finish_reason"))) for each in choices]
        """The index of each, and whether it ends here."""

    def rewrite(self, texts: Sequence[str]) -> None:
        """Put other texts in the place of its own."""
        document = _document(event_data(self.raw) or b"")
        for text, new in zip(texts_of(_choices(document), "choices"), texts, strict=True):
            text.replace(new)
        self.texts = [(path, new) for (path, _), new in zip(self.texts, texts, strict=True)]
        _forget_tokens(document)
        self.raw = _event(document)


class _Ahead:
    """Reads a stream ahead, in a task of its own."""

    def __init__(self, parts: AsyncGenerator[bytes], *, reads_all: Callable[[], bool]) -> None:
        self.events: deque[_Event] = deque()
        self.is_over = False
        self.error: Exception | None = None
        self.changed = asyncio.Event()
        """Set with every event, and at the end."""
        self._parts = parts
        self._reads_all = reads_all
        self._has_room = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    def take(self, count: int) -> list[_Event]:
        """Take the first events."""
        self._has_room.set()
        return [self.events.popleft() for _ in range(count)]

    async def close(self) -> None:
        """End all work on the stream."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._parts.aclose()

    async def _read(self) -> None:
        splitter = EventSplitter()
        try:
            async for part in self._parts:
                self.events.extend(map(_Event, splitter.push(part)))
                self.changed.set()
                await self._bound()
        except Exception as error:  # noqa: BLE001 - it is raised where the stream is read
            self.error = error
        finally:
            self.is_over = True
            self.changed.set()

    async def _bound(self) -> None:
        """Wait for room. Raises GenerationError where none will come."""
        if self._reads_all():
            if len(self.events) > _MAX_EVENTS:
                raise GenerationError("The answer is too long to be checked as a whole.")
            return
        while len(self.events) >= _MAX_AHEAD:
            self._has_room.clear()
            await self._has_room.wait()


class _CheckedStream:
    """One stream while it is checked."""

    def __init__(
        self, checks: RequestChecks, answer: CheckedParts, parts: AsyncGenerator[bytes]
    ) -> None:
        self._checks = checks
        self._answer = answer
        self._parts = parts
        self._sent: defaultdict[str, str] = defaultdict(str)
        """The last characters that were sent, by path."""
        self._seen: dict[int, bool] = {}
        """The choices of which something was sent, and whether they have ended."""

    @property
    def _settings(self) -> Sequence[CheckSettings]:
        return [each.settings for each in self._checks.due]

    @property
    def _is_one_window(self) -> bool:
        """Whether the rest is held until its end."""
        return any(each.where == "after" for each in self._settings)

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield what may be sent."""
        ahead = _Ahead(self._parts, reads_all=lambda: self._is_one_window)
        num_held = 0  # events that were checked and are held back
        try:
            while ahead.events or not ahead.is_over:
                ahead.changed.clear()
                num_free = _num_without_text(ahead.events)
                num_held = max(num_held - num_free, 0)
                if not num_free and self._is_due(ahead, num_held):
                    num_free, num_held = await self._checked(ahead)
                if num_free:
                    yield self._released(ahead.take(num_free))
                else:
                    await ahead.changed.wait()
            if ahead.error is not None:
                raise ahead.error
        except BlockedError:
            await ahead.close()
            yield self._ending(ahead.events)
        finally:
            await ahead.close()

    def _is_due(self, ahead: _Ahead, num_held: int) -> bool:
        """Return whether there is a window to check."""
        if ahead.is_over:
            return True
        if self._is_one_window or len(ahead.events) == num_held:
            return False
        num_chars = sum(event.num_chars for event in ahead.events)
        window = max((each.window for each in self._settings), default=1)
        return num_chars >= window + self._hold_back or len(ahead.events) >= _MAX_AHEAD

    @property
    def _hold_back(self) -> int:
        return max((each.hold_back for each in self._settings), default=0)

    async def _checked(self, ahead: _Ahead) -> tuple[int, int]:
        """Have the events so far checked; return how many may be sent, and how many are held."""
        events, is_last = list(ahead.events), ahead.is_over
        is_changed = await self._judge(events, is_last=is_last)
        is_full = len(events) >= _MAX_AHEAD  # nothing more comes before some go
        keeps_none = is_last or is_changed or is_full
        num_free = len(events) if keeps_none else self._num_free(events)
        return num_free, len(events) - num_free

    def _num_free(self, events: Sequence[_Event]) -> int:
        """Return how many events of a window are far enough from its end to be sent."""
        num_held_chars, hold_back = 0, self._hold_back
        for count in range(len(events), 0, -1):
            if num_held_chars >= hold_back:
                return count
            num_held_chars += events[count - 1].num_chars
        return 0

    async def _judge(self, events: Sequence[_Event], *, is_last: bool) -> bool:
        """Have a window checked; return whether its texts were changed."""
        texts: defaultdict[str, str] = defaultdict(str)
        for event in events:
            for path, text in event.texts:
                texts[path] += text
        asked = [
            {"path": path, "text": text, "before": self._sent[path]} for path, text in texts.items()
        ]
        found = await self._checks.judge(self._checks.due, asked, is_last=is_last)
        if found is None:
            return False
        left = dict(zip(texts, found, strict=True))
        for event in events:
            if event.texts:
                event.rewrite([left.pop(path, "") for path, _ in event.texts])
        return True

    def _released(self, events: Sequence[_Event]) -> bytes:
        """Return the bytes of events that may be sent, and note that they were."""
        for event in events:
            for path, text in event.texts:
                self._sent[path] = (self._sent[path] + text)[-_MAX_SENT_CHARS:]
            self._seen.update(event.choices)
        return b"".join(event.raw for event in events)

    def _ending(self, held: Iterable[_Event]) -> bytes:
        """Return the events that end a blocked stream, in the place of those that are held."""
        first = next(iter(held))
        document = _document(event_data(first.raw) or b"")
        head: dict[str, Any] = {name: document[name] for name in _SHARED if name in document}
        is_chat = "chat" in str(document.get("object"))
        seen = {index: False for event in held for index, _ in event.choices} | self._seen
        choices = [
            {"index": index, **_nothing(is_chat, is_begun=index in self._seen), **_FILTERED}
            for index, has_ended in sorted(seen.items())
            if not has_ended
        ]
        ending = _event({**head, "choices": choices})
        if self._answer.wants_usage and (facts := self._answer.facts) is not None:
            usage = UpstreamUsage(
                num_prompt_tokens=facts.num_prompt_tokens, num_completion_tokens=facts.num_tokens
            )
            ending += _event({**head, "choices": [], "usage": usage_object(usage)})
        return ending + _DONE_EVENT


def _num_without_text(events: Iterable[_Event]) -> int:
    """Return how many events stand before the first text."""
    return sum(1 for _ in takewhile(lambda event: not event.texts, events))


def _nothing(is_chat: bool, *, is_begun: bool) -> dict[str, Any]:
    """Return the content of a choice that has none."""
    if not is_chat:
        return {"text": ""}
    return {"delta": {} if is_begun else {"role": "assistant", "content": ""}}


def _withhold(document: dict[str, Any]) -> None:
    """Take the texts of a whole answer out of it."""
    for choice in _choices(document):
        if "message" in choice:
            choice["message"] = {"role": "assistant", "content": "", "refusal": None}
        else:
            choice["text"] = ""
        choice |= _FILTERED


def _forget_tokens(document: dict[str, Any]) -> None:
    """Take out what would tell the tokens of a text that was changed."""
    for choice in _choices(document):
        for name in _OF_TOKENS:
            if name in choice:
                choice[name] = None


def _choices(document: dict[str, Any]) -> list[dict[str, Any]]:
    choices = document.get("choices")
    return [each for each in choices if isinstance(each, dict)] if choices else []


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else 0


def _document(body: bytes) -> dict[str, Any]:
    """Return the JSON. Raises GenerationError where it is no object."""
    try:
        document = _decode(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise GenerationError(
            "The model's server sent an answer that cannot be checked.", code="unreadable_answer"
        )
    return document


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + escape_line_ends(_encode(document)) + b"\n\n"
