"""The end of a chat's prompt: the start of a new answer, or the middle of one.

vLLM's `add_generation_prompt` and `continue_final_message`, with its meaning.
"""

from typing import Literal

from gateway.errors.tree import BadRequestError
from gateway.schema.chat import AssistantMessage, ChatRequest, join_parts
from gateway.text.structured import plan_structured
from gateway.text.thinking import CLOSE_TAG, OPEN_TAG
from gateway.text.tools import plan_tools

PromptEnd = Literal["new_answer", "messages", "final_message"]
"""new_answer: the template opens an answer. messages: nothing is written behind the messages.
final_message: the last message is an answer that is left open."""


def prompt_end(request: ChatRequest) -> PromptEnd:
    """Return the end that the request asks for.

    Raises BadRequestError for a contradiction, for a last message that cannot be continued, and
    where the answer has to conform to a grammar: a grammar knows no beginning written before it.
    """
    if not request.continue_final_message:
        return "messages" if request.add_generation_prompt is False else "new_answer"
    if request.add_generation_prompt:
        raise _refusal(
            "add_generation_prompt",
            "not together with continue_final_message: the answer is open already",
        )
    if plan_tools(request) is not None:
        raise _refusal(
            "continue_final_message", "not supported together with tools; set tool_choice to none"
        )
    structured = plan_structured(request.response_format, request.structured_outputs)
    if structured is not None:
        raise _refusal("continue_final_message", f"not supported together with {structured.param}")
    _check_final_message(request)
    return "final_message"


def _check_final_message(request: ChatRequest) -> None:
    """Raise BadRequestError where the last message is no text of an assistant."""
    path, message = f"messages.{len(request.messages) - 1}", request.messages[-1]
    if not isinstance(message, AssistantMessage):
        raise _refusal(
            f"{path}.role",
            f"continue_final_message needs a last message of the assistant, not {message.role!r}",
        )
    if message.tool_calls:
        raise _refusal(f"{path}.tool_calls", "a message that calls tools cannot be continued")
    if message.content is None:
        raise _refusal(f"{path}.content", "there is no content to continue")
    text = join_parts(message.content)
    if message.reasoning_content is not None and not text.strip():
        raise _refusal(f"{path}.reasoning_content", "content can be continued, thinking cannot")


def is_amid_thinking(text: str) -> bool:
    """Return whether an assistant's text breaks off in its thinking, behind more than the tag."""
    begun = text.strip()
    return begun.startswith(OPEN_TAG) and begun != OPEN_TAG and CLOSE_TAG not in begun


def _refusal(param: str, reason: str) -> BadRequestError:
    return BadRequestError(f"{param}: {reason}.", param=param)


def continues_text(request: ChatRequest) -> bool:
    """Return whether an answer continues text of its own, so that no thinking can begin it."""
    if not request.continue_final_message:
        return False
    return join_parts(request.messages[-1].content).strip() not in ("", OPEN_TAG)
