"""Endpoints that need only a tokenizer: tokens, their text, control tokens, counts of prompts."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response

from outrider.engine.events import TierInfo
from outrider.gateway.answering.candidates.chains import ChainBook, ModelChain
from outrider.gateway.answering.jobs.engine_requests import check_token_ids
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.prompts import chat_prompt
from outrider.gateway.answering.reading.model_catalog import local_tiers
from outrider.gateway.answering.reading.parsed_request import check_model, permitted
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.prompt_work import PromptWork
from outrider.gateway.contract.errors.tree import BadRequestError, ModelNotFoundError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.parsing import parse, yield_if_long
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.api import Caller
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.reading import read_body
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.tokenize_schema import (
    Detokenized,
    DetokenizeRequest,
    InputTokens,
    TokenCount,
    Tokenized,
    TokenizeMessages,
    TokenizePrompt,
    TokenizerInfo,
)
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.verifier.params import Tier

# Below this an answer is written within about a millisecond: less than a hop to a thread may cost.
_INLINE_TOKENS: Final = 4096
_PASSED_ON: Final = (
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizing:
    """The endpoints. They call no model, and reserve nothing of a tenant's limits.

    Prompts for `auto`, which either tier may answer, are tokenised for the large one, whose answer
    costs more; those for an alias for the model that most often answers first.
    """

    jobs: JobBuilder
    upstream: UpstreamParts
    tokenizers: Mapping[Tier, ChatTokenizer]
    chains: ChainBook
    messages_api: MessagesApi
    responses_api: ResponsesApi
    ignores_unknown: bool = False

    async def tokenize(self, body: bytes, caller: Caller) -> Response:
        """A prompt's tokens. Raises GatewayError or EngineError."""
        form = TokenizeMessages if _has_messages(body) else TokenizePrompt
        await yield_if_long(body)
        read = await read_body(form, body, ignores_unknown=self.ignores_unknown)
        request = read.request
        info = await self._info(request.model, caller.principal)
        tokenizer = self._tokenizer(info)
        work = self.jobs.prompt_work(caller.principal.tenant)
        if isinstance(request, TokenizePrompt):
            token_ids = await _encoded(request, tokenizer, work)
        else:
            given = {name: value for name, value in read.document.items() if name in _PASSED_ON}
            chat = self._chat({"model": request.model or AUTO, **given})
            token_ids = (await chat_prompt(chat, tokenizer, work=work)).token_ids

        def answer() -> Tokenized:
            return Tokenized(
                count=len(token_ids),
                max_model_len=info.max_context,
                tokens=token_ids,
                token_strs=_texts(token_ids, tokenizer) if request.return_token_strs else None,
                tier=info.tier,
            )

        return json_response(await _in_time(answer, len(token_ids)))

    async def detokenize(self, body: bytes, caller: Caller) -> Response:
        """The text of tokens. Raises GatewayError or EngineError."""
        read = await read_body(DetokenizeRequest, body, ignores_unknown=self.ignores_unknown)
        request = read.request
        info = await self._info(request.model, caller.principal)
        check_token_ids(request.tokens, info, param="tokens")
        tokenizer = self._tokenizer(info)

        def text() -> str:
            return tokenizer.decode(request.tokens, with_special=True)

        prompt = await _in_time(text, len(request.tokens))
        return json_response(Detokenized(prompt=prompt, tier=info.tier))

    async def describe(self, model: str | None, principal: Principal) -> Response:
        """A tokenizer's control tokens. Raises GatewayError or EngineError."""
        info = await self._info(model, principal)
        named = self._tokenizer(info).special_tokens
        return json_response(
            TokenizerInfo(
                bos_token=named.get("bos_token"),
                eos_token=named.get("eos_token"),
                pad_token=named.get("pad_token"),
                model_max_length=info.max_context,
                tier=info.tier,
            )
        )

    async def count_tokens(self, body: bytes, caller: Caller) -> Response:
        """The tokens of a prompt of the Messages API. Raises GatewayError or EngineError."""
        count = await self._count(await self.messages_api.read_prompt(body), caller.principal)
        return json_response(TokenCount(input_tokens=count))

    async def count_input(self, body: bytes, caller: Caller) -> Response:
        """The tokens of a prompt of the Responses API. Raises GatewayError or EngineError."""
        chat_body = await self.responses_api.read_prompt(body, caller)
        count = await self._count(chat_body, caller.principal)
        return json_response(InputTokens(object="response.input_tokens", input_tokens=count))

    async def _count(self, chat_body: bytes, principal: Principal) -> int:
        """Return the length of a chat's prompt."""
        await yield_if_long(chat_body)
        document = msgspec.json.decode(chat_body)
        info = await self._info(document["model"], principal)
        chat = self._chat(document)
        work = self.jobs.prompt_work(principal.tenant)
        prompt = await chat_prompt(chat, self._tokenizer(info), work=work)
        return len(prompt.token_ids)

    async def _info(self, model: str | None, principal: Principal) -> TierInfo:
        """Return the tier whose tokenizer applies. Raises GatewayError or EngineError."""
        asked = model or AUTO
        check_model(principal, asked)
        name = self.chains.first_link(asked).model
        self._refuse_upstream(name)
        names = await self.jobs.models.names()
        if name not in names:
            known = local_tiers(names) | {alias: [] for alias in self.chains.aliases}
            raise ModelNotFoundError(asked, principal.scopes.usable(known))
        return permitted(principal, names[name], None)[-1]

    def _chat(self, document: dict[str, Any]) -> ChatRequest:
        """Return the request that the model reads, with an alias's defaults.

        Raises BadRequestError.
        """
        link = self.chains.first_link(document["model"])
        chain = ModelChain(links=(link,), document=document, endpoint="chat")
        return parse(ChatRequest, chain.body(0).raw)

    def _refuse_upstream(self, name: str) -> None:
        """Raise BadRequestError for text that only an upstream server can tokenise."""
        upstream = self.upstream
        if name.partition("/")[0] in upstream.tiers or not upstream.rules.has_local:
            raise BadRequestError(
                "model: only the models of this machine can count tokens, not upstream tiers.",
                param="model",
                code="tokenizer_unknown",
            )

    def _tokenizer(self, info: TierInfo) -> ChatTokenizer:
        return self.tokenizers[info.tier]


def _has_messages(body: bytes) -> bool:
    """Return whether the body has messages; an unreadable one counts as a prompt."""
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "messages" in document


async def _encoded(
    request: TokenizePrompt, tokenizer: ChatTokenizer, work: PromptWork
) -> Sequence[int]:
    if request.add_special_tokens is False:
        return await tokenizer.encode_answer(request.prompt, sys.maxsize, work)
    return (await tokenizer.encode(request.prompt, work=work)).token_ids


def _texts(token_ids: Sequence[int], tokenizer: ChatTokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]


async def _in_time(make: Callable[[], Made], num_tokens: int) -> Made:
    """Long ones in a thread, so that others' answers do not wait for them."""
    return make() if num_tokens <= _INLINE_TOKENS else await asyncio.to_thread(make)
