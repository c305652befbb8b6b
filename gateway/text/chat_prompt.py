"""A chat request's prompt: the only way from its messages to tokens, and the end of it.

The end is the start of a new answer, or the middle of one: vLLM's `add_generation_prompt` and
`continue_final_message`, with its meaning.
"""

from gateway.errors.tree import BadRequestError
from gateway.schema.chat import AssistantMessage, ChatRequest, join_parts
from gateway.text.chat import ChatTokenizer, Prompt, PromptEnd, PromptRoom
from gateway.text.prompt_work import UNBOUNDED, PromptWork
from gateway.text.structured import plan_structured
from gateway.text.thinking import OPEN_TAG
from gateway.text.tools import plan_tools


async def chat_prompt(
    request: ChatRequest,
    tokenizer: ChatTokenizer,
    room: PromptRoom | None = None,
    work: PromptWork = UNBOUNDED,
) -> Prompt:
    """Return the prompt that a tier's model reads. Raises BadRequestError or PromptTooLongError."""
    plan = plan_tools(request) if request.names_tools else None
    return await tokenizer.render_chat(
        request.messages,
        request.chat_template_kwargs,
        plan.tools if plan else (),
        prompt_end(request),
        room,
        work,
    )


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
    if request.names_tools and plan_tools(request) is not None:
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


def _refusal(param: str, reason: str) -> BadRequestError:
    return BadRequestError(f"{param}: {reason}.", param=param)


def continues_text(request: ChatRequest) -> bool:
    """Return whether an answer continues text of its own, so that no thinking can begin it."""
    if not request.continue_final_message:
        return False
    return join_parts(request.messages[-1].content).strip() not in ("", OPEN_TAG)
