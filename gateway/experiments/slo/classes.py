"""The latency objective of a request: its own, or that of its class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.engine.request import NO_OBJECTIVE, LatencyObjective
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions, SloOptions
from outrider.gateway.settings.paths import did_you_mean
from outrider.gateway.settings.slo import (
    BATCH,
    LONG_CONTEXT,
    SHORT_CHAT,
    TOOL_CALLING,
    RefusalRule,
    SloClassSettings,
    SloSettings,
    default_classes,
)

_FLEX: Final = "flex"
_BUILT_IN: Final = default_classes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedObjective:
    """The latency objective of a request, and the class that it belongs to."""

    class_name: str
    """For metrics, and for objectives that the request leaves out."""
    objective: LatencyObjective


class SloClasses:
    """The classes of the settings, and which of them a request belongs to."""

    def __init__(self, settings: SloSettings | None = None) -> None:
        settings = SloSettings() if settings is None else settings
        self._classes = dict(settings.classes)
        self._long_context_tokens = settings.long_context_tokens
        self._rule: RefusalRule = settings.refuse
        self._own = {name: self._resolved(name, None, is_arms=False) for name in self._classes}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the valid values of `outrider.slo.class`."""
        return tuple(self._classes)

    @property
    def settings(self) -> Mapping[str, SloClassSettings]:
        """Return the classes' own objectives, by name."""
        return self._classes

    def check(self, options: OutriderOptions | None) -> None:
        """Raise BadRequestError for an unknown class."""
        slo = None if options is None else options.slo
        name = None if slo is None else slo.class_
        if name is not None and name not in self._classes:
            known = ", ".join(self._classes)
            close = did_you_mean(name, self.names)
            hint = close if "did you mean" in close else ""
            raise BadRequestError(
                f"outrider.slo.class: unknown class {name!r}{hint}; available: {known}.",
                param="outrider.slo.class",
            )

    def resolve(
        self,
        options: OutriderOptions | None,
        *,
        has_tools: bool = False,
        service_tier: str | None = None,
        num_prompt_tokens: int = 0,
        is_arms: bool = False,
    ) -> ResolvedObjective:
        """Return the request's latency objective. Raises BadRequestError for an unknown class.

        A request without a class is batch with `service_tier` flex, tool-calling with tools,
        long-context with a long prompt, and otherwise short-chat, in this order. `is_arms`: the
        class was set by an experiment's arm, so the request did not ask to be refused for it.
        """
        self.check(options)
        slo = None if options is None else options.slo
        own_class = None if slo is None else slo.class_
        name = own_class or self._inferred(has_tools, service_tier, num_prompt_tokens)
        return self._own[name] if slo is None else self._resolved(name, slo, is_arms=is_arms)

    def _resolved(self, name: str, slo: SloOptions | None, *, is_arms: bool) -> ResolvedObjective:
        """Return a class's objective with what the request says in place of the class.

        It is assumed where neither the request nor the settings say anything about it.
        """
        own_ttft_ms = None if slo is None else slo.ttft_ms
        own_inter_token_ms = None if slo is None else slo.inter_token_ms
        settings = self._classes[name]
        ttft_s = _seconds(settings.ttft_ms if own_ttft_ms is None else own_ttft_ms)
        inter_token_s = _seconds(
            settings.inter_token_ms if own_inter_token_ms is None else own_inter_token_ms
        )
        if ttft_s is None and inter_token_s is None and not settings.is_batch:
            return ResolvedObjective(class_name=name, objective=NO_OBJECTIVE)
        objective = LatencyObjective(
            ttft_s=ttft_s,
            inter_token_s=inter_token_s,
            is_batch=settings.is_batch,
            is_yielding=settings.is_batch and settings.is_yielding,
            refuses=self._refuses(ttft_s, is_own=own_ttft_ms is not None and not is_arms),
            is_assumed=slo is None and settings == _BUILT_IN.get(name) and not settings.is_batch,
        )
        return ResolvedObjective(class_name=name, objective=objective)

    def _inferred(self, has_tools: bool, service_tier: str | None, num_prompt_tokens: int) -> str:
        # A request for the cheap place in the queue accepts waiting, with tools or without.
        if service_tier == _FLEX:
            return BATCH
        if has_tools:
            return TOOL_CALLING
        if num_prompt_tokens >= self._long_context_tokens:
            return LONG_CONTEXT
        return SHORT_CHAT

    def _refuses(self, ttft_s: float | None, *, is_own: bool) -> bool:
        if ttft_s is None or self._rule == "never":
            return False
        return is_own or self._rule == "all"


def _seconds(value_ms: float) -> float | None:
    """Return seconds; zero in the settings means no objective."""
    return value_ms / 1000.0 if value_ms > 0 else None
