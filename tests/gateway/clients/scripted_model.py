"""What a good model would say to the clients' first requests: a call, then the call's result."""

import json
from collections.abc import Callable
from typing import Any, Final

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.scripted_client import Script, Step

WORD: Final = "outrider-ok"
_ECHO: Final = "echo outrider-'ok'"
"""Prints WORD without being it: only a result of the call holds the word."""
CITY: Final = {"city": "Oslo"}
CALLS: Final[dict[str, dict[str, Any]]] = {
    "Bash": {"command": _ECHO, "description": "Print a word"},
    "bash": {"command": _ECHO, "description": "Print a word"},
    "exec_command": {"cmd": _ECHO},
    "get_weather": CITY,
}
"""Arguments by tool; of the tools that a request offers the first one here is called."""
_OUTPUT_TOOL: Final = "final_result"
"""Tool by which pydantic-ai takes an answer with a type."""


def answer_to(prompt: str, *, wants_json: bool) -> str:
    """Return the whole answer to a prompt in hermes' format."""
    result = prompt.rpartition("<tool_response>")[2]
    says = _says(prompt, result, wants_json=wants_json)
    return f"Let me see.</think>{says}" if prompt.rstrip().endswith("<think>") else says


def _says(prompt: str, result: str, *, wants_json: bool) -> str:
    if wants_json:
        return json.dumps(CITY)
    if _is_offered(_OUTPUT_TOOL, prompt):
        return _call(_OUTPUT_TOOL, CITY)
    if WORD in result:
        return f"The command printed {WORD}."
    if "7 degrees" in result:
        return "It is 7 degrees in Oslo."
    called = next((name for name in CALLS if _is_offered(name, prompt)), None)
    return "Hello there!" if called is None else _call(called, CALLS[called])


def _is_offered(name: str, prompt: str) -> bool:
    return f'"name": "{name}", "description"' in prompt or f'"name": "{name}", "param' in prompt


def _call(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def scripted_by(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Callable[[EngineRequest], Script]:
    """Return the script of a ScriptedClient with this tokenizer."""

    def script(request: EngineRequest) -> Script:
        prompt = tokenizer.decode(request.prompt_token_ids, with_special=True)
        form = "" if request.grammar is None else request.grammar.text
        wants_json = "json_schema" in form and "tool_call" not in form
        tokens = encode(answer_to(prompt, wants_json=wants_json))
        return Script(steps=[Step(token_ids=(token,)) for token in tokens])

    return script
