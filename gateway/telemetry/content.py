"""Texts of a request and its answer for its root span, in the form of the GenAI conventions.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import json
from collections.abc import Iterable
from typing import Any, Final

_MAX_TEXT_CHARS: Final = 4096
MAX_CHARS: Final = 16384
"""Characters of one attribute, so that a full queue of spans does not fill the memory."""

_Parts = list[dict[str, Any]]


def content_attributes(request: Any, answers: Iterable[str]) -> dict[str, str]:
    """Return the attributes of a request's body, in any API's format, and of its answers' texts.

    The texts are redacted already. Long ones are cut, and the oldest messages left out.
    """
    body = request if isinstance(request, dict) else {}
    asked: Any = next((body[name] for name in ("messages", "input", "prompt") if name in body), [])
    found = {
        "gen_ai.system_instructions": _parts(body.get("system") or body.get("instructions")),
        "gen_ai.input.messages": _messages(asked),
        "gen_ai.output.messages": [_message("assistant", text) for text in answers],
    }
    return {name: _fitting(items) for name, items in found.items() if items}


def _messages(asked: Any) -> _Parts:
    if not isinstance(asked, list) or not all(isinstance(item, dict) for item in asked):
        return [_message("user", asked)]
    return [_message(str(item.get("role", "user")), item) for item in asked]


def _message(role: str, item: Any) -> dict[str, Any]:
    content = item.get("content") if isinstance(item, dict) else item
    calls = item.get("tool_calls") if isinstance(item, dict) else None
    return {"role": role[:32], "parts": _parts(content) + _calls(calls)}


def _parts(content: Any) -> _Parts:
    if isinstance(content, list):
        return [part for item in content for part in _part(item)]
    return _part(content)


def _part(item: Any) -> _Parts:
    """Return a text as a part; of what is not text, the kind alone."""
    text = item.get("text") if isinstance(item, dict) else item
    if isinstance(text, str):
        return [{"type": "text", "content": text[:_MAX_TEXT_CHARS]}] if text else []
    return [{"type": str(item.get("type", "generic"))[:32]}] if isinstance(item, dict) else []


def _calls(calls: Any) -> _Parts:
    functions = [
        (call.get("id"), call["function"])
        for call in (calls if isinstance(calls, list) else [])
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    return [
        {
            "type": "tool_call",
            "id": str(number)[:128],
            "name": str(function.get("name"))[:128],
            "arguments": str(function.get("arguments"))[:_MAX_TEXT_CHARS],
        }
        for number, function in functions
    ]


def _fitting(items: _Parts) -> str:
    """Return as JSON the last items that fit. Half a surrogate pair would spoil its whole batch."""
    kept: list[str] = []
    num_chars = 2
    for item in reversed(items):
        text = json.dumps(item, ensure_ascii=False).encode("utf-8", "replace").decode()
        num_chars += len(text) + 2
        if num_chars > MAX_CHARS:
            break
        kept.append(text)
    return f"[{', '.join(reversed(kept))}]"
