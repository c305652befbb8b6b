"""Answers of the mock server: the same for the same request, in OpenAI's format."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from benchmarks.shared.toxics import (
    CHUNKED_END,
    Plan,
    Step,
    Toxic,
    error_body,
    framed,
    head,
    whole_plan,
)

UsageReport = Literal["as_asked", "always", "never"]
"""Whether the last events of a stream tell the usage; whole answers always do, but for never."""

STAMP: Final = b"@" * 40
"""What a stamped piece holds until it is sent."""

# All begin differently and none is part of another, so a repeated or a lost one can be seen.
_WORDS: Final = (
    *("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel", "ivy", "juniper"),
    *("kapok", "larch", "maple", "nutmeg", "oak", "pine", "quince", "rowan", "spruce", "teak"),
    *("umbrella", "viburnum", "willow", "xylosma", "yew", "zelkova"),
)
_CREATED: Final = 1_700_000_000
# Longer prompts are not searched for an answer that they end in.
_MOST_SEARCHED_CHARS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the answer ends in."""

    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MockScript:
    """A mock's answer to one request."""

    pieces: tuple[str, ...] = ()
    """The answer's tokens; empty: `num_pieces` words that depend on the prompt."""
    num_pieces: int = 16
    is_sampled: bool = False
    """The words depend on the seed too; without one they are others each time."""
    reasoning: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    model: str = "mock-model"
    usage: UsageReport = "as_asked"
    reported_usage: tuple[int, int] | None = None
    """Prompt and completion tokens that it claims instead of the true ones: words of the prompt,
    pieces."""
    is_stamped: bool = False
    """Each piece is 40 digits, the moments when the request was received and when the piece was
    sent, in nanoseconds of time.perf_counter; not for answers to be compared."""
    first_token_delay_s: float = 0.0
    gap_s: float = 0.0
    toxic: Toxic | None = None
    logprobs: Literal["true", "other", "odd", "none"] = "true"
    """Which log-probabilities a request that asks for them gets. other: those of other tokens. odd:
    values that are none."""
    logprob: float = -0.25
    """The log-probability of every token."""


def answer_pieces(
    script: MockScript, document: Mapping[str, Any], *, nonce: str = "", index: int = 0
) -> tuple[str, ...]:
    """The tokens of one choice, behind the beginning that the request holds and within its limit.

    `nonce` stands for chance where a sampled answer has no seed.
    """
    if "messages" in document:
        messages = list(document["messages"])
        begun = ""
        if document.get("continue_final_message"):
            begun = _text(messages.pop().get("content"))
        prompt = _prompt_key(messages)
        whole = _whole_pieces(script, prompt, document, nonce, index)
    else:
        prompt = _text(document.get("prompt"))
        prompt, begun = _split_prompt(script, prompt, document, nonce, index)
        whole = _whole_pieces(script, prompt, document, nonce, index)
    rest = _behind(whole, begun)
    limit = document.get("max_completion_tokens") or document.get("max_tokens")
    return rest if limit is None else rest[: int(limit)]


def answer_text(script: MockScript, document: Mapping[str, Any]) -> str:
    """The content of the first choice: what a test or a benchmark compares with."""
    return "".join(answer_pieces(script, document))


def _text(content: object) -> str:
    """The text of a message or a prompt; parts and lists are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(
            part if isinstance(part, str) else str(part.get("text", ""))
            for part in content
            if isinstance(part, str | Mapping)
        )
    return ""


def _prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"{message.get('role')}: {_text(message.get('content'))}" for message in messages
    )


def _whole_pieces(
    script: MockScript, prompt: str, document: Mapping[str, Any], nonce: str, index: int
) -> tuple[str, ...]:
    """The answer from its very beginning."""
    if script.is_stamped:
        return (STAMP.decode(),) * (len(script.pieces) or script.num_pieces)
    if script.pieces:
        return script.pieces
    key = f"{prompt}\n{index}"
    if script.is_sampled:
        seed = document.get("seed")
        key += f"\n{nonce if seed is None else seed}"
    return _words(key, script.num_pieces)


@lru_cache(maxsize=4096)
def _words(key: str, count: int) -> tuple[str, ...]:
    """Words that look random and are the same for the same key; a longer answer begins alike."""
    draws = hashlib.shake_256(key.encode()).digest(2 * count)
    numbers = (int.from_bytes(draws[2 * i : 2 * i + 2]) for i in range(count))
    words = [f" {_WORDS[n % len(_WORDS)]}{n // len(_WORDS)}" for n in numbers]
    return (words[0].lstrip(), *words[1:]) if words else ()


def _split_prompt(
    script: MockScript, prompt: str, document: Mapping[str, Any], nonce: str, index: int
) -> tuple[str, str]:
    """A completion's prompt, and what of its own answer stands behind it already."""
    if len(prompt) > _MOST_SEARCHED_CHARS:
        return prompt, ""
    for cut in range(1, len(prompt)):
        begun = prompt[cut:]
        whole = "".join(_whole_pieces(script, prompt[:cut], document, nonce, index))
        if whole.startswith(begun):
            return prompt[:cut], begun
    return prompt, ""


def _behind(pieces: tuple[str, ...], begun: str) -> tuple[str, ...]:
    """Return the rest of the answer; all of it where the beginning is of another answer."""
    if not begun or not "".join(pieces).startswith(begun):
        return pieces
    num_chars = len(begun)
    for number, piece in enumerate(pieces):
        if num_chars < len(piece):
            return (piece[num_chars:], *pieces[number + 1 :])
        num_chars -= len(piece)
    return ()


@lru_cache(maxsize=65536)
def _quoted(text: str) -> bytes:
    return msgspec.json.encode(text)


def _usage(script: MockScript, document: Mapping[str, Any], num_pieces: int) -> dict[str, int]:
    """The tokens that the answer claims to have cost."""
    if "messages" in document:
        num_prompt = len(_prompt_key(document["messages"]).split())
    else:
        num_prompt = len(_text(document.get("prompt")).split())
    num_prompt, num_completion = script.reported_usage or (num_prompt, num_pieces)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _logprob(piece: str, script: MockScript) -> dict[str, Any]:
    told = {"token": piece, "logprob": script.logprob, "top_logprobs": []}
    if script.logprobs == "other":
        return told | {"token": "elsewhere ", "bytes": list(b"elsewhere ")}
    if script.logprobs == "odd":
        return told | {"logprob": "low", "bytes": [-1, 999]}
    return told | {"bytes": list(piece.encode())}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One of the n answers."""

    index: int
    pieces: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes one answer's events. `start` and `middle`: what all of them have in common."""

    script: MockScript
    answer_id: str
    document: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.document

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.document.get("logprobs")) and self.script.logprobs != "none"

    def event(self, index: int, delta: bytes, *, piece: str = "", finish: bytes = b"null") -> bytes:
        """One event with one choice; `delta` is JSON (for completions: the text's)."""
        kind, field = (
            (b"chat.completion.chunk", b"delta") if self.is_chat else (_COMPLETION, b"text")
        )
        logprobs = b"null"
        if self.wants_logprobs and piece:
            logprobs = msgspec.json.encode({"content": [_logprob(piece, self.script)]})
        return (
            b'data: {"id":"%b","object":"%b","created":%d,"model":%b,'
            b'"choices":[{"index":%d,"%b":%b,"logprobs":%b,"finish_reason":%b}]}\n\n'
        ) % (
            self.answer_id.encode(),
            kind,
            _CREATED,
            _quoted(self.script.model),
            *(index, field, delta, logprobs, finish),
        )

    def first(self, index: int) -> Iterator[bytes]:
        """The event that names the role; completions have none."""
        if self.is_chat:
            yield self.event(index, b'{"role":"assistant","content":""}')

    def texts(self, choice: _Choice) -> Iterator[bytes]:
        """The events that carry something: thoughts, text, calls."""
        index = choice.index
        if self.is_chat:
            for piece in self.script.reasoning:
                yield self.event(index, b'{"reasoning_content":%b}' % _quoted(piece))
        wrap = b'{"content":%b}' if self.is_chat else b"%b"
        for piece in choice.pieces:
            yield self.event(index, wrap % _quoted(piece), piece=piece)
        for number, call in enumerate(self.script.tool_calls if self.is_chat else ()):
            for part in _call_deltas(self.answer_id, number, call):
                yield self.event(index, msgspec.json.encode({"tool_calls": [part]}))

    def last(self, choice: _Choice) -> bytes:
        """The event with the finish reason."""
        delta = b"{}" if self.is_chat else b'""'
        return self.event(choice.index, delta, finish=_quoted(choice.finish_reason))

    def usage(self, usage: Mapping[str, int]) -> bytes:
        """The event that has no choice."""
        event: dict[str, Any] = {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": _CREATED,
            "model": self.script.model,
            "choices": [],
            "usage": usage,
        }
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def whole(self, choices: Sequence[_Choice], usage: Mapping[str, int]) -> bytes:
        """The answer in one JSON object."""
        body: dict[str, Any] = {
            "id": self.answer_id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": _CREATED,
            "model": self.script.model,
            "choices": [self._whole_choice(choice) for choice in choices],
        }
        if self.script.usage != "never":
            body["usage"] = usage
        return msgspec.json.encode(body)

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.pieces)
        result: dict[str, Any] = {
            "index": choice.index,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if self.wants_logprobs:
            result["logprobs"] = {
                "content": [_logprob(piece, self.script) for piece in choice.pieces]
            }
        if not self.is_chat:
            return result | {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.script.reasoning:
            message["reasoning_content"] = "".join(self.script.reasoning)
        if self.script.tool_calls:
            message["tool_calls"] = [
                _call_object(self.answer_id, number, call)
                for number, call in enumerate(self.script.tool_calls)
            ]
        return result | {"message": message}


_COMPLETION: Final = b"text_completion"


def _call_object(answer_id: str, number: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call-{answer_id}-{number}", "type": "function", "function": function}


def _call_deltas(answer_id: str, number: int, call: ToolCall) -> Iterator[dict[str, Any]]:
    """A call in three parts: its name, and its arguments in two halves."""
    opening = _call_object(answer_id, number, ToolCall(name=call.name, arguments=""))
    yield {"index": number, **opening}
    middle = len(call.arguments) // 2
    for part in (call.arguments[:middle], call.arguments[middle:]):
        yield {"index": number, "function": {"arguments": part}}


def plan_of(script: MockScript, document: Mapping[str, Any], answer_id: str) -> Plan:
    """The answer to a request for a chat or a completion, before any toxic."""
    choices = [
        _choice(script, document, nonce=answer_id, index=index)
        for index in range(int(document.get("n") or 1))
    ]
    num_pieces = sum(len(choice.pieces) + len(script.reasoning) for choice in choices)
    usage = _usage(script, document, num_pieces)
    writer = _Writer(script, answer_id, document)
    if document.get("stream"):
        return Plan(steps=_streamed(writer, choices, usage))
    wait_s = script.first_token_delay_s + script.gap_s * max(0, num_pieces - 1)
    start, body = whole_plan(200, "application/json", writer.whole(choices, usage)).steps
    return Plan(steps=[Step(data=start.data, wait_s=wait_s, is_head=True), body])


def _choice(script: MockScript, document: Mapping[str, Any], *, nonce: str, index: int) -> _Choice:
    pieces = answer_pieces(script, document, nonce=nonce, index=index)
    limit = document.get("max_completion_tokens") or document.get("max_tokens")
    finish = "tool_calls" if script.tool_calls else script.finish_reason
    if limit is not None and len(pieces) == int(limit):
        finish = "length"
    return _Choice(index=index, pieces=pieces, finish_reason=finish)


def _streamed(writer: _Writer, choices: Sequence[_Choice], usage: Mapping[str, int]) -> list[Step]:
    """Head, events and end. The choices take turns, as a server's batch does."""
    script = writer.script
    steps = [Step(data=head(200, "text/event-stream; charset=utf-8"), is_head=True)]
    opening = b"".join(framed(event) for choice in choices for event in writer.first(choice.index))
    steps.append(Step(data=opening, wait_s=script.first_token_delay_s))
    lines = [list(writer.texts(choice)) for choice in choices]
    for turn in range(max(map(len, lines), default=0)):
        wait_s = script.gap_s if turn else 0.0
        for line in lines:
            if turn < len(line):
                steps.append(Step(data=framed(line[turn]), wait_s=wait_s, has_text=True))
                wait_s = 0.0
    closing = [framed(writer.last(choice)) for choice in choices]
    options = writer.document.get("stream_options") or {}
    if script.usage == "always" or (script.usage == "as_asked" and options.get("include_usage")):
        closing.append(framed(writer.usage(usage)))
    closing.append(framed(b"data: [DONE]\n\n") + CHUNKED_END)
    steps.append(Step(data=b"".join(closing)))
    return steps


def models_body(names: Sequence[str]) -> bytes:
    """Return what GET /models answers."""
    cards = [
        {"id": name, "object": "model", "created": _CREATED, "owned_by": "mock"} for name in names
    ]
    return msgspec.json.encode({"object": "list", "data": cards})


def not_found(path: str) -> Plan:
    """The answer to a path that the mock does not have."""
    body = error_body(f"The mock has no {path}.", kind="invalid_request_error", code="unknown_url")
    return whole_plan(404, "application/json", body)
