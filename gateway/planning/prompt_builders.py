"""The parts that differ between chat and completions: prompts, and facts known of the answers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from engine.errors import PromptTooLongError
from engine.events import TierInfo
from engine.request import Tier
from gateway.errors.tree import BadRequestError
from gateway.planning.dialogue import Dialogue
from gateway.planning.engine_requests import ApiRequest, Expected, Rendered, check_token_ids
from gateway.schema.chat import ChatRequest, join_parts
from gateway.schema.completions import CompletionRequest
from gateway.text.chat import ChatTokenizer, Prompt, PromptRoom
from gateway.text.chat_prompt import chat_prompt
from gateway.text.prompt_work import PromptWork
from gateway.text.structured import StructuredPlan, plan_structured
from gateway.text.thinking import Thinking
from gateway.text.tools import plan_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The parts that differ between chat and completions.

    `render` and `expect` make a tier's prompts and the facts known of the answers to them.
    """

    prefix: str
    text: Callable[[ChatTokenizer], str]
    render: Callable[[TierInfo, ChatTokenizer], Awaitable[tuple[Prompt, ...]]]
    expect: Callable[[Rendered], Awaitable[Expected]]
    has_token_ids: bool
    dialogue: Dialogue | None = None


def chat_form(request: ChatRequest, dialogue: Dialogue, work: PromptWork) -> Form:
    """Build the form of a conversation. Raises BadRequestError."""
    plan = plan_tools(request) if request.names_tools else None
    structured = _structured(request)
    if plan is not None and structured is not None:
        raise BadRequestError(
            f"{structured.param}: not supported together with tools; set tool_choice to none.",
            param=structured.param,
        )

    async def render(info: TierInfo, tokenizer: ChatTokenizer) -> tuple[Prompt, ...]:
        room = _room(info, request)
        num_chars = sum(len(join_parts(message.content)) for message in request.messages)
        _refuse_hopeless(num_chars, room, tokenizer)
        return (await chat_prompt(request, tokenizer, room, work),)

    async def expect(rendered: Rendered) -> Expected:
        tokenizer = rendered.tokenizer
        prediction: tuple[int, ...] = ()
        if request.prediction is not None:
            prediction = await tokenizer.encode_answer(
                request.prediction.text, rendered.info.max_context, work
            )
        expected = Expected(prediction=prediction)
        thinking = _thinking(tokenizer, rendered.prompts[0])
        if plan is not None:
            return replace(
                expected,
                grammar=plan.grammar(tokenizer.dialect, thinking),
                tools=plan.reading(tokenizer.dialect),
                grammar_param="tools",
            )
        if structured is not None:
            return replace(
                expected, grammar=structured.grammar(thinking), grammar_param=structured.param
            )
        return expected

    return Form(
        prefix="chatcmpl",
        text=lambda _: request.last_user_text,
        render=render,
        expect=expect,
        has_token_ids=_has_token_ids(request),
        dialogue=dialogue,
    )


def completion_form(request: CompletionRequest, work: PromptWork) -> Form:
    """Build the form of one or several prompts."""

    def text(tokenizer: ChatTokenizer) -> str:
        first = request.prompts[0]
        return first if isinstance(first, str) else tokenizer.decode(first)

    async def render(info: TierInfo, tokenizer: ChatTokenizer) -> tuple[Prompt, ...]:
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                room = _room(info, request)
                _refuse_hopeless(len(prompt), room, tokenizer)
                prompts.append(await tokenizer.encode(prompt, room, work))
            else:
                prompts.append(Prompt(token_ids=prompt))
        return tuple(prompts)

    async def expect(rendered: Rendered) -> Expected:
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, rendered.info)
        structured = plan_structured(None, request.structured_outputs)
        if structured is None:
            return Expected()
        return Expected(grammar=structured.grammar(), grammar_param=structured.param)

    has_token_ids = any(not isinstance(prompt, str) for prompt in request.prompts)
    return Form(
        prefix="cmpl",
        text=text,
        render=render,
        expect=expect,
        has_token_ids=has_token_ids or _has_token_ids(request),
    )


class Prompts:
    """A request's prompts by tier; tiers with the same rendering share them."""

    def __init__(self, form: Form, tokenizers: Mapping[Tier, ChatTokenizer]) -> None:
        self._form = form
        self._tokenizers = tokenizers
        self._done: dict[str, tuple[Prompt, ...]] = {}

    async def of(self, info: TierInfo) -> tuple[Prompt, ...]:
        """Render the prompts for a tier. Raises GatewayError or PromptTooLongError."""
        tokenizer = self._tokenizers[info.tier]
        if tokenizer.rendering not in self._done:
            self._done[tokenizer.rendering] = await self._form.render(info, tokenizer)
        return self._done[tokenizer.rendering]

    async def rendered(self, info: TierInfo) -> Rendered:
        """Render the prompts for a tier, with the facts known of the answers."""
        rendered = Rendered(
            info=info,
            tokenizer=self._tokenizers[info.tier],
            prompts=await self.of(info),
            expected=Expected(),
        )
        return replace(rendered, expected=await self._form.expect(rendered))


def _structured(request: ChatRequest) -> StructuredPlan | None:
    """Plan the fields that give the answer a form. Raises BadRequestError."""
    if request.response_format is None and request.structured_outputs is None:
        return None
    return plan_structured(request.response_format, request.structured_outputs)


def _has_token_ids(request: ApiRequest) -> bool:
    return bool(request.logit_bias or request.stop_token_ids)


def _thinking(tokenizer: ChatTokenizer, prompt: Prompt) -> Thinking:
    """Return if an answer's thinking block is open already, possible, or ruled out."""
    if prompt.opens_thinking:
        return "open"
    return "possible" if tokenizer.may_think else "none"


def _room(info: TierInfo, request: ApiRequest) -> PromptRoom:
    return PromptRoom(max_context=info.max_context, max_tokens=request.token_limit or 1)


def _refuse_hopeless(num_chars: int, room: PromptRoom, tokenizer: ChatTokenizer) -> None:
    """Refuse a text that cannot fit however it is tokenised, before paying for tokenising it."""
    # Normalisation may shorten a text; it does not do so four times.
    at_least = ceil(num_chars / (4 * tokenizer.max_token_bytes))
    if at_least > room.max_context:
        raise PromptTooLongError(
            num_tokens=at_least, max_tokens=room.max_tokens, max_context=room.max_context
        )
