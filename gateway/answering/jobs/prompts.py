"""A request's prompts and conversation, and the facts known of the answers.

All that chat and completions do differently before the engine is asked is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Final

import msgspec

from outrider.engine.errors import PromptTooLongError
from outrider.engine.events import TierInfo
from outrider.gateway.answering.jobs.engine_requests import Rendered, check_token_ids
from outrider.gateway.answering.jobs.functions import with_tools
from outrider.gateway.answering.jobs.job import Answer
from outrider.gateway.answering.jobs.thinking_budget import budget_of, template_effort
from outrider.gateway.answering.reading.parsed_request import ApiRequest
from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.answering.text.chat_template import PromptEnd
from outrider.gateway.answering.text.infilling import no_infilling
from outrider.gateway.answering.text.prompt_work import UNBOUNDED, PromptWork
from outrider.gateway.answering.text.structured import StructuredPlan, plan_structured
from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import AssistantMessage, ChatRequest, Message, join_parts
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.kinds import AUTO, Endpoint
from outrider.gateway.contract.schema.structured import FORM_FIELDS
from outrider.router.conversations import ConversationDigest, ConversationMemory, Turn, is_tool_loop
from outrider.verifier.params import Tier

# About as long as an idle prefix stays in the cache of a server in use.
_CACHE_LIFETIME_S: Final = 600.0
_NO_OPTIONS: Final = OutriderOptions()


class Dialogue:
    """One request's messages against the memory of turns. Only digests of text are kept."""

    def __init__(
        self, messages: Sequence[Message], memory: ConversationMemory, salt: str = ""
    ) -> None:
        """`salt` is the tenant's: no tenant learns which tiers answered another's conversations."""
        self._memory = memory
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        num_before = answers[-1] + 1 if answers else 0
        self._digest = memory.digest()
        if salt:
            self._digest.add("tenant", salt, ())
        for message in messages[:num_before]:
            _add_to(self._digest, message)
        self._rest = tuple(messages[num_before:])
        self._turn = memory.recall(self._digest) if answers else None
        self._messages = messages

    @property
    def is_tool_loop(self) -> bool:
        """Return whether the last answer's calls have results."""
        return is_tool_loop(
            (message.role, isinstance(message, AssistantMessage) and bool(message.tool_calls))
            for message in self._messages
        )

    @property
    def tier(self) -> Tier | None:
        """The tier that gave the last answer; None where it is unknown."""
        return None if self._turn is None else self._turn.tier

    @property
    def num_new_chars(self) -> int:
        """Characters behind the last answer."""
        return sum(len(_text(message)) for message in self._rest)

    def cached_turn(self, now_s: float) -> Turn | None:
        """The last turn, as long as its tokens are likely to be in the cache."""
        turn = self._turn
        return turn if turn is not None and now_s - turn.at_s <= _CACHE_LIFETIME_S else None

    def remember(self, answer: Answer, num_prompt_tokens: int, now_s: float) -> None:
        """Note that the conversation goes on with this answer, should its messages come back."""
        digest = self._digest.copy()
        for message in self._rest:
            _add_to(digest, message)
        digest.add("assistant", answer.text, answer.calls)
        turn = Turn(tier=answer.tier, num_tokens=num_prompt_tokens + answer.num_tokens, at_s=now_s)
        self._memory.remember(digest, turn)


class Prompts(ABC):
    """A request's prompts by tier; tiers with the same rendering share them.

    Chat and completions differ in these methods only.
    """

    endpoint: Endpoint
    id_prefix: str
    """The beginning of the answer's id."""
    request: ApiRequest
    dialogue: Dialogue | None = None
    """The conversation, where it is one."""
    names_functions: bool = False
    """Its tools are given as `functions`."""

    def __init__(
        self, request: ApiRequest, tokenizers: Mapping[Tier, ChatTokenizer], work: PromptWork
    ) -> None:
        self.request = request
        self.options = request.outrider or _NO_OPTIONS
        # Ids mean something in one tokenizer only.
        self.has_token_ids = bool(request.logit_bias or request.stop_token_ids)
        self._tokenizers = tokenizers
        self._work = work
        self._done: dict[str, tuple[Prompt, ...]] = {}

    @property
    def is_auto(self) -> bool:
        """True if no tier is named by the model."""
        return self.request.model == AUTO

    @property
    def num_choices(self) -> int:
        """The choices for each prompt."""
        return self.request.n or 1

    async def of(self, info: TierInfo) -> tuple[Prompt, ...]:
        """Render the prompts for a tier, once. Raises GatewayError or PromptTooLongError."""
        tokenizer = self._tokenizers[info.tier]
        if tokenizer.rendering not in self._done:
            limit = self.request.token_limit
            work = self._work.within(info.max_context, 1 if limit is None else limit)
            self._done[tokenizer.rendering] = await self._render(tokenizer, work)
        return self._done[tokenizer.rendering]

    async def rendered(self, info: TierInfo) -> Rendered:
        """Render the prompts for a tier, with the facts known of the answers."""
        return await self._expect(info, self._tokenizers[info.tier], await self.of(info))

    async def echoed(self, tokenizer: ChatTokenizer) -> tuple[str, ...]:
        """Return the text that the answers to each prompt begin with."""
        return ("",)

    def able(self, infos: Sequence[TierInfo]) -> Sequence[TierInfo]:
        """Return the models that can do what is asked. Raises BadRequestError where none can."""
        return infos

    @abstractmethod
    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the text that the router judges."""

    @abstractmethod
    async def _render(self, tokenizer: ChatTokenizer, work: PromptWork) -> tuple[Prompt, ...]:
        """Render the prompts with a tier's tokenizer, within its context (`work`).

        Raises GatewayError or PromptTooLongError.
        """

    @abstractmethod
    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        """Add the facts known of the answers. Raises BadRequestError."""


class ChatPrompts(Prompts):
    """The prompt of a conversation."""

    endpoint = "chat"
    id_prefix = "chatcmpl"

    request: ChatRequest
    dialogue: Dialogue

    def __init__(
        self,
        request: ChatRequest,
        tokenizers: Mapping[Tier, ChatTokenizer],
        work: PromptWork,
        memory: ConversationMemory,
        salt: str = "",
    ) -> None:
        """Plan the tools and the form of the answer. `salt` is the tenant's.

        Raises BadRequestError.
        """
        self.names_functions = bool(request.functions)
        if request.uses_functions:
            request = with_tools(request)
        super().__init__(request, tokenizers, work)
        self.dialogue = Dialogue(request.messages, memory, salt)
        self._tools = plan_tools(request) if request.names_tools else None
        self._structured = structured = _structured(request)
        if self._tools is not None and structured is not None:
            raise BadRequestError(
                f"{structured.param}: not supported together with tools; set tool_choice to none.",
                param=structured.param,
            )

    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the last message of the user."""
        return self.request.last_user_text

    async def _render(self, tokenizer: ChatTokenizer, work: PromptWork) -> tuple[Prompt, ...]:
        num_chars = sum(len(join_parts(message.content)) for message in self.request.messages)
        _refuse_hopeless(num_chars, tokenizer, work)
        return (await chat_prompt(self.request, tokenizer, work),)

    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        prediction: tuple[int, ...] = ()
        if self.request.prediction is not None:
            prediction = await tokenizer.encode_answer(
                self.request.prediction.text, info.max_context, self._work
            )
        rendered = Rendered(info=info, tokenizer=tokenizer, prompts=prompts, prediction=prediction)
        if self.request.limits_thinking and not continues_text(self.request, tokenizer):
            budget = budget_of(self.request, tokenizer, prompts[0])
            rendered = msgspec.structs.replace(rendered, thinking=budget)
        thinking = tokenizer.thinking(prompts[0])
        if self._tools is not None:
            return msgspec.structs.replace(
                rendered,
                grammar=self._tools.grammar(tokenizer.dialect, tokenizer.reasoning, thinking),
                tools=self._tools.reading(tokenizer.dialect),
                grammar_param="tools",
                schema=self._tools.answer_schema(tokenizer.dialect),
            )
        if self._structured is not None:
            return msgspec.structs.replace(
                rendered,
                grammar=self._structured.grammar(thinking, tokenizer.reasoning),
                grammar_param=self._structured.param,
                schema=self._structured.answer_schema(),
            )
        return rendered


class CompletionPrompts(Prompts):
    """One or several prompts, of text or token ids."""

    endpoint = "completion"
    id_prefix = "cmpl"

    request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        tokenizers: Mapping[Tier, ChatTokenizer],
        work: PromptWork,
    ) -> None:
        super().__init__(request, tokenizers, work)
        self.has_token_ids |= any(not isinstance(prompt, str) for prompt in request.prompts)

    def text(self, tokenizer: ChatTokenizer) -> str:
        """Return the first prompt; in front of a suffix it may be empty."""
        first = self.request.prompts[0]
        text = first if isinstance(first, str) else tokenizer.decode(first)
        return text or self.request.suffix or ""

    def able(self, infos: Sequence[TierInfo]) -> Sequence[TierInfo]:
        """Leave out models that cannot fill in, where it is asked for."""
        if not self.request.fills_in:
            return infos
        able = [info for info in infos if self._tokenizers[info.tier].infilling]
        if infos and not able:
            raise no_infilling()
        return able

    async def echoed(self, tokenizer: ChatTokenizer) -> tuple[str, ...]:
        """Return the prompts, those of token ids as the text that an answer would be."""
        prompts = self.request.prompts
        if not self.request.echo:
            return ("",) * len(prompts)
        return tuple([await self._echo(prompt, tokenizer) for prompt in prompts])

    async def _echo(self, prompt: str | tuple[int, ...], tokenizer: ChatTokenizer) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._work.run(len(prompt), partial(tokenizer.decode, prompt))

    async def _render(self, tokenizer: ChatTokenizer, work: PromptWork) -> tuple[Prompt, ...]:
        prompts = []
        for prompt in self.request.prompts:
            if self.request.fills_in:
                prompts.append(await self._infill(prompt, tokenizer, work))
            elif isinstance(prompt, str):
                _refuse_hopeless(len(prompt), tokenizer, work)
                prompts.append(await tokenizer.encode(prompt, work))
            else:
                prompts.append(Prompt(token_ids=prompt))
        return tuple(prompts)

    async def _infill(
        self, prefix: str | tuple[int, ...], tokenizer: ChatTokenizer, work: PromptWork
    ) -> Prompt:
        suffix, files = self.request.suffix or "", self.request.input_extra or ()
        given = prefix if isinstance(prefix, str) else ""
        _refuse_hopeless(len(given) + len(suffix), tokenizer, work)
        return await tokenizer.encode_infill(prefix, suffix, files, work)

    async def _expect(
        self, info: TierInfo, tokenizer: ChatTokenizer, prompts: tuple[Prompt, ...]
    ) -> Rendered:
        for prompt in self.request.prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, info)
        infilling = tokenizer.infilling if self.request.fills_in else None
        ends = () if infilling is None else infilling.tokens.ends
        rendered = Rendered(info=info, tokenizer=tokenizer, prompts=prompts, ends=ends)
        structured = _structured(self.request)
        if structured is None:
            return rendered
        return msgspec.structs.replace(
            rendered,
            grammar=structured.grammar(),
            grammar_param=structured.param,
            schema=structured.answer_schema(),
        )


def _structured(request: ApiRequest) -> StructuredPlan | None:
    """Plan the fields that give the answer a form. Raises BadRequestError."""
    if FORM_FIELDS.isdisjoint(request.model_fields_set):
        return None
    return plan_structured(request)


def _refuse_hopeless(num_chars: int, tokenizer: ChatTokenizer, work: PromptWork) -> None:
    """Refuse a text that cannot fit however it is tokenised, before paying for tokenising it."""
    # Normalisation may shorten a text; it does not do so four times.
    at_least = ceil(num_chars / (4 * tokenizer.max_token_bytes))
    if work.max_context is not None and at_least > work.max_context:
        raise PromptTooLongError(
            num_tokens=at_least, max_tokens=work.max_tokens, max_context=work.max_context
        )


def _add_to(digest: ConversationDigest, message: Message) -> None:
    calls = message.tool_calls or () if isinstance(message, AssistantMessage) else ()
    named = [(call.function.name, call.function.arguments) for call in calls]
    digest.add(message.role, _text(message), named)


def _text(message: Message) -> str:
    return join_parts(message.content)


async def chat_prompt(
    request: ChatRequest, tokenizer: ChatTokenizer, work: PromptWork = UNBOUNDED
) -> Prompt:
    """Return the prompt that a tier's model reads: the only way from its messages to tokens.

    Raises BadRequestError or PromptTooLongError.
    """
    if request.uses_functions:
        request = with_tools(request)
    plan = plan_tools(request) if request.names_tools else None
    variables = request.chat_template_kwargs
    if request.reasoning_effort is not None:
        variables = {**template_effort(request, tokenizer), **(variables or {})}
    return await tokenizer.render_chat(
        request.messages,
        variables,
        plan.tools if plan else (),
        prompt_end(request),
        work,
    )


def prompt_end(request: ChatRequest) -> PromptEnd:
    """Return the end that the request asks for: the start of a new answer, or the middle of one.

    These are vLLM's `add_generation_prompt` and `continue_final_message`, with their meaning.
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
    structured = _structured(request)
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
    if message.thoughts is not None and not text.strip():
        raise _refusal(f"{path}.reasoning_content", "content can be continued, thinking cannot")


def _refusal(param: str, reason: str) -> BadRequestError:
    return BadRequestError(f"{param}: {reason}.", param=param)


def continues_text(request: ApiRequest, tokenizer: ChatTokenizer) -> bool:
    """Return whether an answer continues text of its own, so that no thinking can begin it."""
    if isinstance(request, CompletionRequest):
        return True
    if not request.continue_final_message:
        return False
    return join_parts(request.messages[-1].content).strip() not in (
        "",
        tokenizer.reasoning.format.open,
    )
