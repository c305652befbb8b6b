"""A request's prompts, and the facts known of the answers: where chat and completions differ."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from engine.errors import PromptTooLongError
from engine.events import TierInfo
from engine.request import Tier
from gateway.errors.tree import BadRequestError
from gateway.planning.dialogue import Dialogue
from gateway.planning.engine_requests import ApiRequest, Rendered, check_token_ids
from gateway.schema.chat import ChatRequest, join_parts
from gateway.schema.completions import CompletionRequest
from gateway.text.chat import ChatTokenizer, Prompt, PromptRoom
from gateway.text.chat_prompt import chat_prompt
from gateway.text.prompt_work import PromptWork
from gateway.text.structured import StructuredPlan, plan_structured
from gateway.text.thinking import Thinking
from gateway.text.tools import plan_tools


class Prompts(ABC):
    """A request's prompts by tier; tiers with the same rendering share them.

    Chat and completions differ in these methods only. `id_prefix`: of the answer's id.
    `dialogue`: the conversation, where it is one.
    """

    id_prefix: str
    dialogue: Dialogue | None = None

    def __init__(
        self, tokenizers: Mapping[Tier, ChatTokenizer], work: PromptWork, *, has_token_ids: bool
    ) -> None:
        """`has_token_ids`: the request has ids, which mean something in one tokenizer only."""
        self.has_token_ids = has_token_ids
        self._tokenizers = tokenizers
        self._work = work
        self._done: dict[str, tuple[Prompt, ...]] = {}

    async def of(self, info: TierInfo) -> tuple[Prompt, ...]:
        """Render the prompts for a tier, once. Raises GatewayError or PromptTooLongError."""
        tokenizer = self._tokenizers[info.tier]
        if tokenizer.rendering not in self._done:
            self._done[tokenizer.rendering] = await self._render(info, tokenizer)
        return self._done[tokenizer.rendering]

    async def rendered(self, info: TierInfo) -> Rendered:
        """Render the prompts for a tier, with the facts known of the answers."""
        return await self._expect(info, self._tokenizers[info.tier], await self.of(info))

    @abstractmethod
    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the text that the router judges."""

    @abstractmethod
    async def _render(self, info: TierInfo, tokenizer: ChatTokenizer) -> tuple[Prompt, ...]:
        """Render the prompts for a tier. Raises GatewayError or PromptTooLongError."""

    @abstractmethod
    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        """Add the facts known of the answers. Raises BadRequestError."""


class ChatPrompts(Prompts):
    """The prompt of a conversation."""

    id_prefix = "chatcmpl"

    def __init__(
        self,
        request: ChatRequest,
        dialogue: Dialogue,
        tokenizers: Mapping[Tier, ChatTokenizer],
        work: PromptWork,
    ) -> None:
        """Plan the tools and the form of the answer. Raises BadRequestError."""
        super().__init__(tokenizers, work, has_token_ids=_has_token_ids(request))
        self.dialogue = dialogue
        self._request = request
        self._tools = plan_tools(request) if request.names_tools else None
        self._structured = structured = _structured(request)
        if self._tools is not None and structured is not None:
            raise BadRequestError(
                f"{structured.param}: not supported together with tools; set tool_choice to none.",
                param=structured.param,
            )

    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the last message of the user."""
        return self._request.last_user_text

    async def _render(self, info: TierInfo, tokenizer: ChatTokenizer) -> tuple[Prompt, ...]:
        room = _room(info, self._request)
        num_chars = sum(len(join_parts(message.content)) for message in self._request.messages)
        _refuse_hopeless(num_chars, room, tokenizer)
        return (await chat_prompt(self._request, tokenizer, room, self._work),)

    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        prediction: tuple[int, ...] = ()
        if self._request.prediction is not None:
            prediction = await tokenizer.encode_answer(
                self._request.prediction.text, info.max_context, self._work
            )
        rendered = Rendered(info=info, tokenizer=tokenizer, prompts=prompts, prediction=prediction)
        thinking = _thinking(tokenizer, prompts[0])
        if self._tools is not None:
            return replace(
                rendered,
                grammar=self._tools.grammar(tokenizer.dialect, thinking),
                tools=self._tools.reading(tokenizer.dialect),
                grammar_param="tools",
            )
        if self._structured is not None:
            return replace(
                rendered,
                grammar=self._structured.grammar(thinking),
                grammar_param=self._structured.param,
            )
        return rendered


class CompletionPrompts(Prompts):
    """One or several prompts, of text or token ids."""

    id_prefix = "cmpl"

    def __init__(
        self,
        request: CompletionRequest,
        tokenizers: Mapping[Tier, ChatTokenizer],
        work: PromptWork,
    ) -> None:
        has_token_ids = any(not isinstance(prompt, str) for prompt in request.prompts)
        super().__init__(tokenizers, work, has_token_ids=has_token_ids or _has_token_ids(request))
        self._request = request

    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the first prompt."""
        first = self._request.prompts[0]
        return first if isinstance(first, str) else tokenizer.decode(first)

    async def _render(self, info: TierInfo, tokenizer: ChatTokenizer) -> tuple[Prompt, ...]:
        prompts = []
        for prompt in self._request.prompts:
            if isinstance(prompt, str):
                room = _room(info, self._request)
                _refuse_hopeless(len(prompt), room, tokenizer)
                prompts.append(await tokenizer.encode(prompt, room, self._work))
            else:
                prompts.append(Prompt(token_ids=prompt))
        return tuple(prompts)

    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        for prompt in self._request.prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, info)
        rendered = Rendered(info=info, tokenizer=tokenizer, prompts=prompts)
        structured = plan_structured(None, self._request.structured_outputs)
        if structured is None:
            return rendered
        return replace(rendered, grammar=structured.grammar(), grammar_param=structured.param)


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
