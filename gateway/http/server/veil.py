"""Hides from a client what its key and its alias do not reveal: costs, or tiers as well."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.streaming import sse
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.model_cards import ModelCard
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.upstream.event_stream import EventSplitter, event_data

_TIER_HEADERS: Final = frozenset({"x-outrider-tier", "x-outrider-reason"})
_TIER_FIELDS: Final = frozenset(
    {"tier", "reason", "route_tier", "model_id", "alternatives", "pair", "sticky", "chances"}
)
_ANSWER_FIELDS: Final = frozenset(
    {
        *("id", "object", "created", "model", "choices", "usage", "outrider", "error"),
        *("service_tier", "prompt_logprobs", "prompt_token_ids"),
    }
)
"""Fields of an answer that say nothing of its server; others may name the provider."""

_COST: Final = b'"cost'
"""The beginning of the name of every field that tells a cost."""

_TIER_NAMED: Final = re.compile(
    r"\b([Tt]he )\S+ (?:or \S+ ){0,3}(?=tier\b)|\b(tiers\.)[^.\s]+(?=\.)"
    r"|(unknown tier .{0,300}); available: .*"
)

_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode: Final = msgspec.json.decode
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Veil:
    """Hides the operator's costs, and with `hides_tiers` which server answered."""

    model: str
    """The model as the request names it."""
    hides_tiers: bool

    def event(self, part: bytes) -> bytes:
        """Return a part of a stream. This runs for each token of each client that has a veil."""
        if not self.hides_tiers and _COST not in part:
            return part
        splitter = EventSplitter()
        return b"".join(map(self._event, splitter.push(part))) + splitter.rest

    def _event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return b":\n\n" if self.hides_tiers else event
        return event if data.strip() == b"[DONE]" else sse.event(self.body(data))

    def body(self, body: bytes) -> bytes:
        """Return a whole answer, or an event's data; what is no JSON object stays as it is."""
        if not self.hides_tiers and _COST not in body:
            return body
        try:
            fields = _read_fields(body)
        except (ValueError, RecursionError):
            return body
        if self.hides_tiers:
            fields = {name: raw for name, raw in fields.items() if name in _ANSWER_FIELDS}
        return self._encoded(fields)

    def passed_body(self, body: bytes) -> bytes:
        """Return an answer of another endpoint, whose fields are its server's own."""
        try:
            return self._encoded(_read_fields(body))
        except (ValueError, RecursionError):
            return body

    def _encoded(self, fields: dict[str, msgspec.Raw]) -> bytes:
        if self.hides_tiers and "model" in fields:
            fields["model"] = msgspec.Raw(_encode(self.model))
        for name in ("outrider", "usage"):
            if name in fields and isinstance(report := _decode(fields[name]), dict):
                fields[name] = msgspec.Raw(_encode(self.report(report)))
        return _encode(fields)

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return a report with null in the place of what is hidden."""
        return {name: None if self._is_hidden(name) else v for name, v in report.items()}

    def _is_hidden(self, name: str) -> bool:
        return name.startswith("cost") or (self.hides_tiers and name in _TIER_FIELDS)

    def delivered(self, report: DeliveredReport) -> DeliveredReport:
        """Return the same of an answer that broke off."""
        return DeliveredReport(**self.report(msgspec.structs.asdict(report)))

    def route(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return a route report, and what it says of other tiers."""
        shown = self.report(report)
        if self.hides_tiers:
            shown["model"] = self.model
        shown["alternatives"] = [self.report(one) for one in shown["alternatives"] or ()]
        return shown

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that may be sent."""
        if not self.hides_tiers:
            return dict(headers)
        return {name: value for name, value in headers.items() if name not in _TIER_HEADERS}

    def problem(self, problem: Problem) -> Problem:
        """Return an error that names no tier."""
        return without_tiers(problem) if self.hides_tiers else problem


def without_tiers(problem: Problem) -> Problem:
    """Return an error that names no tier. What a server has written stays as it is."""
    message = problem.message
    if problem.raw is None:
        message = _TIER_NAMED.sub(_unnamed, message)
    headers = {n: v for n, v in problem.headers.items() if n not in _TIER_HEADERS}
    return replace(problem, message=message, headers=headers)


def _unnamed(found: re.Match[str]) -> str:
    return found[1] + "upstream " if found[1] else found[2] + "NAME" if found[2] else found[3] + "."


_OF_COSTS: Final = Veil(model="", hides_tiers=False)


def veil_of(chains: ChainBook, body: bytes, principal: Principal) -> Veil | None:
    """Return what hides a request's answer from its client; None where nothing is hidden."""
    usual = principal.scopes.shown()
    if usual == "costs":
        return None  # by its own right, whatever an alias says
    if usual == "tiers" and (principal.scopes.reveals or not chains.aliases):
        return _OF_COSTS  # whatever model the body names: it is not read for that
    return veil_for(chains, chains.requested(body), principal)


def veil_for(chains: ChainBook, model: str, principal: Principal) -> Veil | None:
    """Return the same for a request that names this model."""
    alias = chains.aliases.get(model)
    shown = principal.scopes.shown(None if alias is None else alias.reveals)
    return None if shown == "costs" else Veil(model=model, hides_tiers=shown == "nothing")


def veiled_card(card: ModelCard, veil: Veil | None) -> ModelCard:
    """Return a model's card without the tiers behind it, where these are hidden."""
    if veil is None or not veil.hides_tiers:
        return card
    return msgspec.structs.replace(card, owned_by="outrider", tier=None, outrider=[])
