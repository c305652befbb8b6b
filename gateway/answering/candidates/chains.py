"""Chains of models: what an alias or a request's `models` stands for, and when it goes on."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from outrider.engine.errors import EngineError, PromptTooLongError
from outrider.gateway.answering.candidates.alias_router import AliasRouter, without_used
from outrider.gateway.answering.candidates.failures import CutShortError, is_passing, together
from outrider.gateway.answering.reading.parsed_request import check_model
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BudgetError,
    GatewayError,
    PermissionDeniedError,
    RateLimitError,
    UpstreamRefusalError,
)
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.kinds import Endpoint, FallbackKind
from outrider.gateway.contract.schema.parsing import RequestJson, refuse_doubled_names
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.router.tier_policy import TierRoute

MAX_MODELS: Final = 8
"""Models that one request may name."""
_FIELD: Final = "models"
_LENGTHS: Final = ("max_tokens", "max_completion_tokens")
_ALL_KINDS: Final[frozenset[FallbackKind]] = frozenset(
    {"failure", "context_length", "content_filter", "deadline"}
)
_FILTERED: Final = (b"content_filter", b"content_policy_violation", b"ResponsibleAIPolicyViolation")
_TOO_LONG: Final = (
    b"context_length_exceeded",
    b"exceed_context_size_error",  # llama.cpp
    b"maximum context length",  # vLLM, SGLang
    b"prompt is too long",  # Anthropic
    b"exceeds the available context size",
)
_MAX_SEARCHED_BYTES: Final = 4096


ModelOrder = Callable[[str, AliasSettings], Sequence[str]]
"""Returns the models of an alias in the order in which they are tried."""


class _Named(msgspec.Struct):
    """The names in a request's body; other fields are skipped unread."""

    model: Any = None
    models: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """A model of a chain, with the fields that its aliases set for clients that leave them out."""

    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    falls_back_on: frozenset[FallbackKind] = _ALL_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChain:
    """The models that may answer one request, in the order in which they are tried."""

    links: Sequence[ChainLink]
    document: Mapping[str, Any]
    """The request's JSON, which names the alias still."""
    endpoint: Endpoint
    route: TierRoute | None = None
    """The router's decision that orders the links; None where none has one."""

    def body(self, index: int) -> RequestJson:
        """Return the request as one that names the link's model. Raises BadRequestError."""
        link = self.links[index]
        document = {name: value for name, value in self.document.items() if name != _FIELD}
        known = CompletionRequest.model_fields
        for name, value in link.defaults.items():
            if name == "outrider":
                own = document.get(name)
                document[name] = {**value, **own} if isinstance(own, dict) else own or value
            elif (
                (name in known or self.endpoint == "chat")
                and document.get(name) is None
                and not _is_given(name, document)
            ):
                document[name] = value
        document["model"] = link.model
        if self.route is not None:
            document = without_used(document)
        try:
            return RequestJson(msgspec.json.encode(document), document)
        except (OverflowError, RecursionError, ValueError):
            raise BadRequestError(
                "The request has a number of more than 64 bits or is nested too deeply."
            ) from None

    def falls_back_on(self, index: int) -> frozenset[FallbackKind]:
        """Return why the link after this one would be tried; empty where there is none."""
        return frozenset() if self.is_last(index) else self.links[index].falls_back_on

    def is_last(self, index: int) -> bool:
        """Return whether no link is behind this one."""
        return index + 1 >= len(self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBook:
    """Finds the chain that a request names. `rng` draws where an alias has weights."""

    aliases: Mapping[str, AliasSettings] = field(default_factory=dict)
    routers: Mapping[str, AliasRouter] = field(default_factory=dict)
    """Those of aliases that have one."""
    rng: random.Random = field(default_factory=random.Random)

    def chain_of(
        self, endpoint: Endpoint, body: RequestJson, principal: Principal
    ) -> ModelChain | None:
        """Return the request's chain; None where it names one model that is no alias.

        Raises BadRequestError for `models` that is no list of names, and PermissionDeniedError for
        a name that the key may not use.
        """
        if not self.aliases and b'"models"' not in body.raw:
            return None
        named = _named_in(body.raw)
        if named.models is None and (
            not isinstance(named.model, str) or named.model not in self.aliases
        ):
            return None
        refuse_doubled_names(body.raw)
        names = self.names_in(named.model, named.models)
        for name in names:
            check_model(principal, name)
        document, routes = body.document, list[TierRoute]()

        def ordered(name: str, alias: AliasSettings) -> Sequence[str]:
            router = self.routers.get(name)
            route = None
            if router is not None:
                route = router.route(document, alias.defaults, principal)
            if route is None:
                return self._drawn(name, alias)
            routes.append(route)
            return route.order

        return ModelChain(
            links=self.links_of(names, ordered),
            document=document,
            endpoint=endpoint,
            route=routes[0] if routes else None,
        )

    @staticmethod
    def requested(body: bytes) -> str:
        """Return the name that a request gives first; empty where it gives none."""
        named = _named_in(body)
        several = named.models if isinstance(named.models, list) else ()
        first = next((name for name in (named.model, *several) if name is not None), None)
        return first if isinstance(first, str) else ""

    @staticmethod
    def names_in(model: object, models: object) -> tuple[str, ...]:
        """Return the names that a request gives: `model`, then `models`. Raises BadRequestError."""
        if models is None:
            if not isinstance(model, str) or not model:
                raise BadRequestError("model: the name of a model is required.", param="model")
            return (model,)
        if not isinstance(models, list) or not 1 <= len(models) <= MAX_MODELS:
            raise BadRequestError(
                f"{_FIELD}: a list of 1 to {MAX_MODELS} names of models is required; they are "
                "tried in this order.",
                param=_FIELD,
            )
        names = [*([] if model is None else [model]), *models]
        for name in names:
            if not isinstance(name, str) or not name:
                raise BadRequestError(f"{_FIELD}: each entry is the name of a model.", param=_FIELD)
        return tuple(dict.fromkeys(names))

    def links_of(
        self, names: Sequence[str], ordered: ModelOrder | None = None
    ) -> tuple[ChainLink, ...]:
        """Return the models that names stand for, each once."""
        links: dict[str, ChainLink] = {}
        for name in names:
            for link in self._links(name, ordered or self._drawn):
                links.setdefault(link.model, link)
        return tuple(links.values())

    def first_models(self) -> dict[str, str]:
        """Return the model at the head of each alias, as its card shows it."""
        return {name: self.first_link(name).model for name in self.aliases}

    def first_link(self, name: str) -> ChainLink:
        """Return the model that most often answers to a name first."""
        alias = self.aliases.get(name)
        if alias is None:
            return ChainLink(model=name)
        weights = alias.weights or (1.0,)
        link = self.first_link(alias.models[max(range(len(weights)), key=weights.__getitem__)])
        return replace(link, defaults={**link.defaults, **alias.defaults})

    def _links(self, name: str, ordered: ModelOrder) -> Iterator[ChainLink]:
        """Yield the models that a name stands for; an outer alias's defaults win."""
        alias = self.aliases.get(name)
        if alias is None:
            yield ChainLink(model=name)
            return
        kinds = frozenset(alias.fallback_on)
        for model in ordered(name, alias):
            for link in self._links(model, ordered):
                yield replace(
                    link,
                    defaults={**link.defaults, **alias.defaults},
                    falls_back_on=link.falls_back_on & kinds,
                )

    def _drawn(self, name: str, alias: AliasSettings) -> Sequence[str]:
        """Return an alias's models, the drawn one first."""
        del name
        if not alias.weights:
            return alias.models
        first = self.rng.choices(alias.models, alias.weights)[0]
        return (first, *(model for model in alias.models if model != first))


def _named_in(body: bytes) -> _Named:
    """Return the names in a body; none in what is no request: its reader says what is wrong."""
    try:
        return msgspec.json.decode(body, type=_Named)
    except (ValueError, RecursionError):
        return _Named()


def goes_on(error: Exception, kinds: frozenset[FallbackKind]) -> bool:
    """Return whether the next model of a chain may answer after this error of the one before."""
    kind = _kind_of(error)
    return kind is not None and (kind == "capability" or kind in kinds)


def _kind_of(error: Exception) -> FallbackKind | str | None:
    """Return why another model may answer; None where the request itself is at fault."""
    match error:
        case CutShortError():
            return error.kind
        case PromptTooLongError():
            return "context_length"
        case UpstreamRefusalError():
            return _refused_for(error)
        case BadRequestError() | PermissionDeniedError():
            return None if error.code == "invalid_json" else "capability"
        case RateLimitError() | BudgetError():
            return None if error.tier is None else "failure"
    return "failure" if is_passing(error) else None


def _refused_for(error: UpstreamRefusalError) -> FallbackKind | None:
    """Return what a server's refusal is about, by its code or its words."""
    body = error.body[:_MAX_SEARCHED_BYTES] + str(error)[:_MAX_SEARCHED_BYTES].encode()
    if any(word in body for word in _FILTERED):
        return "content_filter"
    if any(word in body for word in _TOO_LONG):
        return "context_length"
    return "failure" if is_passing(error) else None


def error_of_all(errors: Sequence[GatewayError | EngineError]) -> Exception:
    """Return one error for all models of a chain: the first one's, if it is the request's fault."""
    first = errors[0]
    if len(errors) == 1 or not any(goes_on(error, frozenset({"failure"})) for error in errors):
        return first
    passing = [error for error in errors if _kind_of(error) == "failure"]
    if not passing:
        return first
    return together("model of the chain", dict(enumerate(errors, 1)), passing)


def _is_given(name: str, document: Mapping[str, Any]) -> bool:
    """Return whether a length is given under its other name."""
    return name in _LENGTHS and any(document.get(other) not in (None, -1) for other in _LENGTHS)
