"""The endpoints of /admin/prompts: prompts that engines keep in their caches, by name."""

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request

from outrider.engine.events import PinInfo
from outrider.gateway.answering.jobs.named_prompts import NamedPrompts
from outrider.gateway.audit.chain import Change
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError
from outrider.gateway.contract.schema.chat import ChatRequest, Message
from outrider.gateway.contract.schema.common import ListOf, ModelName, RequestModel
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.structs import CompleteModel, says
from outrider.gateway.contract.schema.template_variables import TemplateVariables
from outrider.gateway.contract.schema.tools import MAX_TOOLS, Tool
from outrider.gateway.tenancy.keys.admin_handlers import (
    AdminCall,
    AdminHandlers,
    AdminQuery,
    admin,
)
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.gateway.workers.siblings import Siblings
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

MAX_NAME_CHARS: Final = 64
MAX_TTL_S: Final = 30 * 86_400
_TENANT: Final = AdminQuery(
    name="tenant", description="The id of a team, or of a key without one; else the caller's own."
)


class PromptKeep(RequestModel):
    """A prompt to keep: the fields of a chat that it is made of."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    model: Annotated[ModelName, Field(description="auto: each model of this machine keeps it.")] = (
        AUTO
    )
    ttl_s: Annotated[float, Field(ge=1.0, le=MAX_TTL_S)] = 3600.0
    tenant: Annotated[
        str | None,
        Field(
            max_length=128,
            description="Whose requests find it: the id of a team, or of a key without one; "
            "absent: the caller's own.",
        ),
    ] = None

    @property
    def chat(self) -> ChatRequest:
        """The chat that the prompt is the beginning of."""
        given = {name: getattr(self, name) for name in _OF_CHATS & self.model_fields_set}
        return ChatRequest.model_construct(**given)


_OF_CHATS: Final = frozenset({"messages", "tools", "chat_template_kwargs", "model"})


class PromptTier(CompleteModel, kw_only=True):
    """What a tier's engines keep of a prompt."""

    tier: Tier
    tokens: Annotated[int, says("What requests find of it: whole blocks.")]
    engines: Annotated[int, says("How many keep it.")]
    expires_in_s: Annotated[float, says("Until the first of them keeps it no more.")]


class PromptReport(CompleteModel, kw_only=True):
    """A prompt that engines keep. `tenant`: whose requests find it."""

    object: Literal["prompt"] = "prompt"
    name: str
    tenant: str
    tiers: list[PromptTier]


class PromptList(CompleteModel, kw_only=True):
    """All prompts that engines keep, those of other gateways too."""

    object: Literal["list"] = "list"
    data: list[PromptReport]


class PromptDeleted(CompleteModel, kw_only=True):
    """The prompt that is kept no more."""

    object: Literal["prompt.deleted"] = "prompt.deleted"
    name: str
    tenant: str


class PromptApi(AdminHandlers):
    """Handlers of named prompts; they also raise EngineErrors.

    While no key exists, whoever reaches this machine's gateway may do without the admin scope what
    its requests do anyway: fill a part of the cache.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        registry: KeyRegistry | None,
        prompts: NamedPrompts,
        read_body: Callable[[Request], Awaitable[bytes]],
        siblings: Siblings | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`siblings`: the gateway's other processes, which forget what this one keeps."""
        super().__init__(authenticator, read_body)
        self._registry = registry
        self._prompts = prompts
        self._siblings = siblings
        self._audit = audit or AuditLog()

    def require(self, principal: Principal) -> None:
        """Raise AuthenticationError or PermissionDeniedError for who may not."""
        if not (principal is ANONYMOUS and self._authenticator.is_open):
            super().require(principal)

    @admin("GET", "/admin/prompts", "All prompts that are kept.")
    async def list_prompts(self, _: AdminCall) -> PromptList:
        """Return what engines keep."""
        return PromptList(data=_reports(await self._prompts.kept()))

    @admin("PUT", "/admin/prompts/{prompt}", "The prompt, which is kept from now on.")
    async def keep_prompt(self, call: AdminCall, wanted: PromptKeep) -> PromptReport:
        """Have a prompt computed and kept, in the place of one with this name."""
        name = _checked_name(call.name("prompt"))
        owner = self._owner(call.principal, wanted.tenant)
        kept_as = {"name": name, "model": wanted.model, "ttl_s": wanted.ttl_s}
        async with self._audit.changing(_change("keep", owner, kept_as)):
            await self._tell_siblings(owner.tenant, name)
            await self._prompts.keep(name, wanted.chat, wanted.ttl_s, owner)
        logger.info("prompt kept by=%s name=%s tenant=%s", call.by, name, owner.tenant)
        kept = await self._prompts.kept()
        own = [each for each in kept if (each.tenant, each.name) == (owner.tenant, name)]
        return next(iter(_reports(own)), PromptReport(name=name, tenant=owner.tenant, tiers=[]))

    @admin("DELETE", "/admin/prompts/{prompt}", "The prompt is kept no more.", queries=(_TENANT,))
    async def delete_prompt(self, call: AdminCall) -> PromptDeleted:
        """Have a prompt kept no longer."""
        name, owner = (
            _checked_name(call.name("prompt")),
            self._owner(call.principal, call.text(_TENANT)),
        )
        async with self._audit.changing(_change("delete", owner, {"name": name})):
            await self._tell_siblings(owner.tenant, name)
            await self._prompts.delete(name, owner.tenant)
        logger.info("prompt deleted by=%s name=%s tenant=%s", call.by, name, owner.tenant)
        return PromptDeleted(name=name, tenant=owner.tenant)

    async def forget(self, value: Any) -> None:
        """Forget what another process of this gateway keeps, or deletes."""
        tenant, name = value
        self._prompts.forget(tenant, name)

    async def _tell_siblings(self, tenant: str, name: str) -> None:
        if self._siblings is not None:
            await self._siblings.others("forget_prompt", (tenant, name))

    def _owner(self, caller: Principal, tenant: str | None) -> Principal:
        """Return a principal whose requests are to find the prompt. Raises NotFoundError."""
        if tenant is None or tenant == caller.tenant:
            return caller
        found = None if self._registry is None else self._registry.member(tenant)
        if found is None:
            raise NotFoundError(
                f"There is no key {tenant!r} without a team, and no team of this id with a key."
            )
        return found


def _change(action: str, owner: Principal, details: dict[str, Any]) -> Change:
    """Return what the audit log says of it: nothing of the prompt's text."""
    target = f"prompts/{owner.tenant}"
    return Change(action=f"prompt.{action}", target=target, after=details)


def _checked_name(name: str) -> str:
    is_plain = name.isascii() and name.translate(_PUNCTUATION).isalnum()
    if not is_plain or len(name) > MAX_NAME_CHARS:
        raise BadRequestError(
            f"A prompt's name has at most {MAX_NAME_CHARS} characters: letters, digits, '.', '_' "
            "and '-'.",
            param="name",
        )
    return name


_PUNCTUATION: Final = {ord(character): "x" for character in "._-"}


def _reports(kept: list[PinInfo]) -> list[PromptReport]:
    """Join what several engines keep of each prompt, by tier."""
    by_name: dict[tuple[str, str], dict[Tier, list[PinInfo]]] = {}
    for each in kept:
        tiers = by_name.setdefault((each.tenant, each.name), {})
        tiers.setdefault(each.tier, []).append(each)
    return [
        PromptReport(
            name=name,
            tenant=tenant,
            tiers=[
                PromptTier(
                    tier=tier,
                    tokens=min(each.num_tokens for each in own),
                    engines=len(own),
                    expires_in_s=round(min(each.left_s for each in own), 3),
                )
                for tier, own in tiers.items()
            ],
        )
        for (tenant, name), tiers in by_name.items()
    ]
