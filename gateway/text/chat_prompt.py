"""A chat request's prompt: the only way from its messages to tokens."""

from gateway.schema.chat import ChatRequest
from gateway.text.chat import ChatTokenizer, Prompt, PromptRoom
from gateway.text.prompt_end import prompt_end
from gateway.text.prompt_work import UNBOUNDED, PromptWork
from gateway.text.tools import plan_tools


async def chat_prompt(
    request: ChatRequest,
    tokenizer: ChatTokenizer,
    room: PromptRoom | None = None,
    work: PromptWork = UNBOUNDED,
) -> Prompt:
    """Return the prompt that a tier's model reads. Raises BadRequestError or PromptTooLongError."""
    plan = plan_tools(request)
    return await tokenizer.render_chat(
        request.messages,
        request.chat_template_kwargs,
        plan.tools if plan else (),
        prompt_end(request),
        room,
        work,
    )
