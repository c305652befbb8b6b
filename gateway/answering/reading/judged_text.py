"""What a router judges of a request's document: its text, and whether it goes on with tools."""

from collections.abc import Mapping
from typing import Any

from outrider.router.conversations import is_tool_loop


def judged_text(document: Mapping[str, Any]) -> str:
    """Return the text that the router judges: the user's last message, or the first prompt."""
    messages = document.get("messages")
    if isinstance(messages, list):
        asked = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        return _text_of(asked[-1].get("content") if asked else None)
    return _text_of(document.get("prompt"))


def goes_on_with_tools(document: Mapping[str, Any]) -> bool:
    """Return whether the document answers calls of tools."""
    messages = document.get("messages")
    return isinstance(messages, list) and is_tool_loop(
        (str(message.get("role")), bool(message.get("tool_calls")))
        for message in messages
        if isinstance(message, dict)
    )


def _text_of(content: object) -> str:
    """Return a message's text, or a prompt's; of one in parts, the texts of all of them."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))
