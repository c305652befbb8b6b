"""Files that hold an answer: one JSON document, or the events of a stream as they came."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.gateway.tools.commands.user_errors import ChatError


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ChatError."""
    return _object(_content(path), path)


def read_answer_file(path: Path) -> dict[str, Any]:
    """Return a whole answer, made of its events where it was streamed. Raises ChatError."""
    content = _content(path)
    if not content.lstrip().startswith("data:"):
        return _object(content, path)
    events = [line[5:].strip() for line in content.splitlines() if line.startswith("data:")]
    return whole_of(_object(event, path) for event in events if event != "[DONE]")


def whole_of(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that a stream's chunks add up to, as far as a verification reads it."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        kept = ("id", "model", "prompt_token_ids", "outrider", "system_fingerprint")
        whole |= {name: chunk[name] for name in kept if chunk.get(name) is not None}
        for piece in chunk.get("choices") or ():
            _add(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a chunk's part of a choice."""
    if piece.get("token_ids"):
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if "text" in piece:
        choice["text"] = choice.get("text", "") + piece["text"]
    delta = piece.get("delta") or {}
    for name in ("content", "reasoning_content", "reasoning"):
        if delta.get(name):
            message = choice.setdefault("message", {})
            message[name] = message.get(name, "") + delta[name]
    if delta.get("function_call"):
        message = choice.setdefault("message", {})
        _add_parts(message.setdefault("function_call", _no_function()), delta["function_call"])
    for call in delta.get("tool_calls") or ():
        _add_call(choice.setdefault("message", {}).setdefault("tool_calls", []), call)
    for name in ("prompt_token_ids", "finish_reason"):
        if piece.get(name) is not None:
            choice[name] = piece[name]


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a chunk's part of a call, which may be its beginning."""
    if piece["index"] >= len(calls):
        calls.append({"type": "function", "function": _no_function()})
    _add_parts(calls[-1]["function"], piece.get("function") or {})


def _no_function() -> dict[str, str]:
    return {"name": "", "arguments": ""}


def _add_parts(function: dict[str, str], piece: dict[str, Any]) -> None:
    for name, text in piece.items():
        function[name] = function.get(name, "") + (text or "")


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read: {error}") from None


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{path} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ChatError(f"{path} holds no JSON object")
    return document
