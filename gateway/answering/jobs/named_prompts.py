"""Prompts that administrators have engines keep, by name: how they are rendered, and where.

What is kept is what every conversation with this beginning has in common: the prompt is rendered as
a request's is, several times, with different words behind it.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.engine.errors import EngineError
from outrider.engine.events import PinInfo, TierInfo
from outrider.engine.request import EngineRequest, Pin
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.prompts import chat_prompt
from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.contract.schema.chat import ChatRequest, InputMessage, join_parts
from outrider.gateway.tenancy.keys.keys import Principal, Scopes
from outrider.verifier.params import SamplingParams

logger = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
_WORDS: Final = ("A", "B b")
"""What may come behind a prompt: nothing that one begins with the other begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A prompt that all engines of its tier are to keep."""

    request: EngineRequest
    pin: Pin
    until_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class NamedPrompts:
    """Has the engines behind this gateway keep prompts.

    The engines know what they keep. What was wanted here is remembered too, for those that come
    later or start anew.
    """

    jobs: JobBuilder
    _wanted: dict[tuple[str, str], list[_Wanted]] = field(default_factory=dict, init=False)

    async def keep(self, name: str, chat: ChatRequest, ttl_s: float, owner: Principal) -> None:
        """Have a prompt computed and kept, by each engine of each model that may answer to it.

        Raises GatewayError or EngineError where one does not; then nothing is kept by this name.
        """
        models = self.jobs.models
        infos = await models.tiers_named(chat.model, Scopes())
        self.forget(owner.tenant, name)
        try:
            for info in infos:
                request = await self._request(chat, info, Pin(name=name, ttl_s=ttl_s), owner)
                await models.engine.pin(request)
                self._remember(request)
        except BaseException:
            await self._let_go(owner.tenant, name)
            raise

    def _remember(self, request: EngineRequest) -> None:
        assert request.pin is not None
        wanted = _Wanted(
            request=request, pin=request.pin, until_s=self.jobs.clock() + request.pin.ttl_s
        )
        self._wanted.setdefault((request.tenant, request.pin.name), []).append(wanted)

    async def _request(
        self, chat: ChatRequest, info: TierInfo, pin: Pin, owner: Principal
    ) -> EngineRequest:
        return EngineRequest(
            request_id=_new_id(),
            prompt_token_ids=await self._beginning(chat, info, owner),
            tier=info.tier,
            sampling=SamplingParams(max_tokens=0),
            cache_salt=owner.cache_salt,
            tenant=owner.tenant,
            weight=owner.weight,
            adapters=() if info.adapter is None else (info.adapter,),
            pin=pin,
        )

    async def _beginning(
        self, chat: ChatRequest, info: TierInfo, owner: Principal
    ) -> tuple[int, ...]:
        """Return the tokens that conversations with these messages begin with."""
        tokenizer = self.jobs.tokenizers[info.tier]
        work = self.jobs.prompt_work(owner.tenant).within(info.max_context, 1)
        prompts = [(await chat_prompt(each, tokenizer, work)).token_ids for each in _followed(chat)]
        return prompts[0][: _num_common(prompts)]

    async def delete(self, name: str, tenant: str) -> None:
        """Have a prompt kept no longer. Raises NotFoundError where there is none of this name."""
        found = await self.kept()
        if all((each.tenant, each.name) != (tenant, name) for each in found):
            raise NotFoundError(f"There is no prompt {name!r} of {tenant!r}.")
        await self._let_go(tenant, name)

    async def _let_go(self, tenant: str, name: str) -> None:
        self.forget(tenant, name)
        await self.jobs.models.engine.unpin(tenant, name)

    def forget(self, tenant: str, name: str) -> None:
        """Do nothing more for a prompt: it was deleted, or another process keeps it now."""
        self._wanted.pop((tenant, name), None)

    async def kept(self) -> list[PinInfo]:
        """Return what the engines keep, one behind the other. Raises EngineError."""
        return (await self.jobs.models.engine.stats()).pins

    async def tend(self) -> None:
        """Look again and again whether an engine lacks a prompt that is wanted; never return."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except EngineError as error:  # none serves now
                logger.debug("named prompts are looked after later reason=%s", error)

    async def look(self) -> None:
        """Have engines that came later, or started anew, keep what is wanted."""
        for key, wanted in list(self._wanted.items()):
            left = [each for each in wanted if each.until_s > self.jobs.clock()]
            self._wanted[key] = left
            if not left:
                del self._wanted[key]
        if self._wanted:
            counts = Counter(map(_key, await self.kept()))
            for each in list(self._missing(counts)):
                left_s = max(each.until_s - self.jobs.clock(), 1.0)
                pin = replace(each.pin, ttl_s=left_s)
                await self._keep_again(replace(each.request, request_id=_new_id(), pin=pin))

    def _missing(self, counts: Counter[tuple[str, str, str]]) -> Iterator[_Wanted]:
        fleet = self.jobs.models.fleet
        for (tenant, name), wanted in self._wanted.items():
            for each in wanted:
                tier = each.request.tier
                num_engines = 1 if fleet is None else fleet.num_up(tier)
                if counts[tenant, name, tier] < num_engines:
                    yield each

    async def _keep_again(self, request: EngineRequest) -> None:
        assert request.pin is not None
        try:
            await self.jobs.models.engine.pin(request)
        except EngineError as error:
            logger.warning(
                "a prompt is not kept everywhere name=%s error=%s", request.pin.name, error
            )


def _key(info: PinInfo) -> tuple[str, str, str]:
    return info.tenant, info.name, info.tier


def _new_id() -> str:
    return f"pin-{secrets.token_hex(12)}"


def _followed(chat: ChatRequest) -> list[ChatRequest]:
    """Return the chat with different things behind it, one of them nothing where it is a whole."""
    *before, last = chat.messages
    if last.role == "user":  # a document: questions may stand behind it in the same message
        text = join_parts(last.content)
        ends = [last, *(last.model_copy(update={"content": f"{text}\n\n{w}"}) for w in _WORDS)]
        return [chat.model_copy(update={"messages": [*before, end]}) for end in ends]
    questions = [InputMessage(role="user", content=words) for words in _WORDS]
    return [chat.model_copy(update={"messages": [*chat.messages, q]}) for q in questions]


def _num_common(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with."""
    number = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        number += 1
    return number
