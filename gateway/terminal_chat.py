"""`outrider chat`: a conversation over HTTP, with the drafted tokens in colour."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from gateway.terminal import DRAFTED_STYLE, token_text

_HELP = "Type a message; /new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


class ChatError(Exception):
    """The gateway refused the request or could not be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What is asked of every answer. `max_tokens`: None leaves it to the gateway."""

    model: str = "auto"
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    speculation: bool = True

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if not self.speculation:
            body["outrider"] = {"speculation": "off"}
        return body


@dataclass(slots=True)
class Answer:
    """An answer as it arrived. `pieces`: (text, whether it had been drafted); times in seconds."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    num_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    ttft_s: float | None = None
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(text for text, _ in self.pieces)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for answers too short to have one."""
        if self.ttft_s is None or self.num_tokens < 2 or self.duration_s <= self.ttft_s:
            return None
        return (self.num_tokens - 1) / (self.duration_s - self.ttft_s)

    def summary(self) -> str:
        """One line: who answered, how fast, what was drafted."""
        parts = [f"{self.report.get('tier', '?')} ({self.report.get('reason', '?')})"]
        if self.ttft_s is not None:
            parts.append(f"ttft {self.ttft_s * 1000:.0f} ms")
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"{rate:.1f} tok/s")
        parts.append(f"{self.num_tokens} tokens")
        drafted, accepted = (self.report.get(f"{k}_tokens", 0) for k in ("drafted", "accepted"))
        parts.append(f"{drafted} drafted, {accepted} accepted")
        return " · ".join(parts)


def is_reachable(url: str) -> bool:
    """Whether a gateway answers there."""
    try:
        return httpx.get(f"{url}/health", timeout=1.0).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def stream_answer(
    client: httpx.Client, body: dict[str, Any], answer: Answer
) -> Iterator[tuple[str, bool]]:
    """Send one request; yields its pieces as they come and fills `answer`. Raises ChatError.

    Closing the iterator hangs up, which ends the answer in the engine too.
    """
    started_s = time.perf_counter()
    try:
        with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-outrider-trace": "1"}
        ) as response:
            if response.status_code != 200:
                raise ChatError(_error_message(response))
            for chunk in _chunks(response):
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
    except httpx.HTTPError as error:
        raise ChatError(f"the connection to {client.base_url} broke: {error}") from error


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises ChatError for an error in mid-stream."""
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if error := chunk.get("error"):
            raise ChatError(error["message"])
        yield chunk


def _pieces(chunk: dict[str, Any]) -> list[tuple[str, bool]]:
    """Text of a chunk, token by token where the gateway traced it."""
    if traced := (chunk.get("outrider") or {}).get("tokens"):
        return [(text, drafted) for text, drafted in traced if text]
    found = []
    for choice in chunk["choices"]:
        delta = choice["delta"]
        if text := delta.get("reasoning_content") or delta.get("content"):
            found.append((text, False))
    return found


def _error_message(response: httpx.Response) -> str:
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"{message} (status {response.status_code})"


def say(
    console: Console, client: httpx.Client, options: ChatOptions, messages: list[dict[str, str]]
) -> Answer:
    """Stream one answer to the terminal and add it to the conversation. Raises ChatError."""
    answer = Answer()
    stream = stream_answer(client, options.body(messages), answer)
    try:
        for text, was_drafted in stream:
            console.print(token_text(text, was_drafted=was_drafted), end="", soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    finally:
        stream.close()  # type: ignore[attr-defined]
        console.print()
    messages.append({"role": "assistant", "content": answer.text})
    console.print(answer.summary(), style="dim", markup=False, soft_wrap=True)
    return answer


def converse(console: Console, client: httpx.Client, options: ChatOptions) -> None:
    """Read messages until the end of input. Errors end an answer, not the conversation."""
    console.print(f"[dim]{_HELP}[/dim]")
    console.print(f"[{DRAFTED_STYLE}]green[/] [dim]tokens were drafted by the small model[/dim]")
    messages: list[dict[str, str]] = []
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
            say(console, client, options, messages)
        except ChatError as error:
            messages.pop()
            console.print(str(error), style="red", markup=False, soft_wrap=True)
