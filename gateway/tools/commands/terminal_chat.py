"""`outrider chat`: a conversation over HTTP, with the drafted tokens in colour."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
from rich.console import Console

from outrider.gateway.tools.commands.chat_options import ChatOptions
from outrider.gateway.tools.commands.session import HTTP_ERRORS, open_session
from outrider.gateway.tools.commands.terminal import DRAFTED_STYLE, token_text
from outrider.gateway.tools.commands.user_errors import ChatError
from outrider.gateway.upstream.event_stream import EventSplitter, event_data

_DEGRADED: Final = "degraded: an upstream tier should have answered and could not"
_HELP: Final = "Type a message; /new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
# Servers call thinking by either name.
_THINKING_FIELDS: Final = ("reasoning_content", "reasoning")
_HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(connect=1.0, sock_read=1.0)
_TIMEOUT: Final = aiohttp.ClientTimeout(connect=30.0)  # an answer may take any time
_CUT_OFF: Final = "the connection was closed before the answer was complete"
_DRAFTED_HELP: Final = (
    f"[{DRAFTED_STYLE}]green[/] [dim]tokens were drafted by the small model[/dim]"
)


class TimedPiece(NamedTuple):
    """Text as it arrived, by token where the gateway told."""

    text: str
    was_drafted: bool = False
    is_thinking: bool = False


@dataclass(slots=True)
class ChatAnswer:
    """An answer as it arrived. Times in seconds."""

    pieces: list[TimedPiece] = field(default_factory=list)
    num_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    ttft_s: float | None = None
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        """The whole answer, without the thinking before it."""
        return "".join(piece.text for piece in self.pieces if not piece.is_thinking)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for answers too short to have one."""
        if self.ttft_s is None or self.num_tokens < 2 or self.duration_s <= self.ttft_s:
            return None
        return (self.num_tokens - 1) / (self.duration_s - self.ttft_s)

    @property
    def is_degraded(self) -> bool:
        """Return whether an upstream tier should have answered and could not."""
        return bool(self.report.get("degraded"))

    def summary(self) -> str:
        """Return one line: tier, reason, speed, drafted tokens or cost."""
        report = self.report
        parts = [f"{report.get('tier', '?')} ({report.get('reason', '?')})"]
        if hand_off := report.get("hand_off"):
            parts.append(f"hand-off: {hand_off}")
        if self.ttft_s is not None:
            parts.append(f"ttft {self.ttft_s * 1000:.0f} ms")
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"{rate:.1f} tok/s")
        parts.append(f"{self.num_tokens} tokens")
        if "drafted_tokens" in report:  # upstream models do not report them
            drafted, accepted = report["drafted_tokens"], report["accepted_tokens"]
            parts.append(f"{drafted} drafted, {accepted} accepted")
        if (cost_usd := report.get("cost_usd")) is not None:
            parts.append(f"{cost_usd:.6f} USD")
        return " · ".join(parts)


def is_reachable(url: str) -> bool:
    """Return whether a gateway answers at this URL."""

    async def status() -> int:
        async with (
            open_session(url, timeout=_HEALTH_TIMEOUT) as session,
            session.get(f"{url}/health", allow_redirects=False) as response,
        ):
            return response.status

    try:
        return asyncio.run(status()) == 200
    except HTTP_ERRORS:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway."""

    url: str
    key: str | None = None
    """Where the gateway requires one."""

    async def stream(self, body: dict[str, Any], answer: ChatAnswer) -> AsyncIterator[TimedPiece]:
        """Send one request; yield its pieces as they come, and fill `answer`. Raises ChatError.

        Cancellation closes the connection, which ends the answer in the engine too.
        """
        started_s = time.perf_counter()
        try:
            async for chunk in self._chunks(body):
                for piece in _pieces(chunk):
                    now_s = time.perf_counter() - started_s
                    answer.ttft_s = now_s if answer.ttft_s is None else answer.ttft_s
                    answer.duration_s = now_s
                    answer.pieces.append(piece)
                    yield piece
                if usage := chunk.get("usage"):
                    answer.num_tokens = usage["completion_tokens"]
                if (report := chunk.get("outrider")) and "tier" in report:
                    answer.report = report
        except aiohttp.ClientPayloadError as error:
            raise ChatError(_CUT_OFF) from error
        except HTTP_ERRORS as error:
            raise ChatError(f"the connection to {self.url} broke: {error}") from error

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event.

        Answers of upstream servers are relayed byte for byte, so events are split by the standard's
        rules. Raises ChatError for a refusal, an error in mid-stream, and a stream without an end.
        """
        splitter = EventSplitter()
        async with (
            open_session(self.url, key=self.key, timeout=_TIMEOUT) as session,
            session.post(
                f"{self.url}/v1/chat/completions",
                json=body,
                headers={"x-outrider-trace": "1"},
                allow_redirects=False,
            ) as response,
        ):
            if response.status != 200:
                raise ChatError(_refusal(response.status, await response.text("utf-8", "replace")))
            async for data in response.content.iter_any():
                for event in splitter.push(data):
                    said = event_data(event)
                    if said == b"[DONE]":
                        return
                    if said is not None:
                        yield _chunk(said)
        raise ChatError(_CUT_OFF)


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ChatError("the rest of the answer cannot be read: it is not JSON")
    if error := chunk.get("error"):
        raise ChatError(_said_of(error))
    return chunk


def _said_of(error: object) -> str:
    """An error object's message; what is no such object, as it stands."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)


def _pieces(chunk: dict[str, Any]) -> list[TimedPiece]:
    """Text of a chunk, token by token where the gateway traced it."""
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    if traced := (chunk.get("outrider") or {}).get("tokens"):
        is_thinking = any(delta.get(name) for delta in deltas for name in _THINKING_FIELDS)
        return [TimedPiece(text, drafted, is_thinking) for text, drafted in traced if text]
    return [
        TimedPiece(text, is_thinking=name != "content")
        for delta in deltas
        for name in (*_THINKING_FIELDS, "content")
        if (text := delta.get(name))
    ]


def _refusal(status: int, text: str) -> str:
    try:
        message = _said_of(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    return f"{message} (status {status})"


def say(
    console: Console, gateway: Gateway, options: ChatOptions, messages: list[dict[str, str]]
) -> ChatAnswer:
    """Stream one answer to the terminal and add it to the conversation. Raises ChatError."""
    answer = ChatAnswer()

    async def show() -> None:
        async for piece in gateway.stream(options.body(messages), answer):
            _show(console, piece, answer.pieces[-2:-1])

    try:
        with asyncio.Runner() as runner:
            runner.run(show())
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="" if answer.pieces else "\n")
    finally:
        if answer.pieces:
            console.print()
    messages.append({"role": "assistant", "content": answer.text})
    if answer.report:  # comes last: an answer that was stopped has none
        console.print(answer.summary(), style="dim", markup=False, soft_wrap=True)
    if answer.is_degraded:
        console.print(_DEGRADED, style="yellow", markup=False, soft_wrap=True)
    return answer


def _show(console: Console, piece: TimedPiece, before: Sequence[TimedPiece]) -> None:
    """Print a piece; thinking is dim, and the answer behind it begins a line of its own."""
    if not piece.is_thinking and any(earlier.is_thinking for earlier in before):
        console.print()
    text = token_text(piece.text, was_drafted=piece.was_drafted)
    console.print(text, end="", soft_wrap=True, style="dim" if piece.is_thinking else None)


def converse(console: Console, gateway: Gateway, options: ChatOptions) -> None:
    """Read messages until the end of input. Errors end an answer, not the conversation."""
    console.print(f"[dim]{_HELP}[/dim]")
    messages: list[dict[str, str]] = []
    has_explained = False
    while True:
        try:
            text = console.input("[bold cyan]you[/] > ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/new":
                messages.clear()
                console.print("[dim]a new conversation[/dim]")
                continue
        messages.append({"role": "user", "content": text})
        try:
            answer = say(console, gateway, options, messages)
        except ChatError as error:
            messages.pop()
            console.print(str(error), style="red", markup=False, soft_wrap=True)
            continue
        if not has_explained and any(piece.was_drafted for piece in answer.pieces):
            has_explained = True
            console.print(_DRAFTED_HELP)
