"""Finds the upstream tier for a request that is passed on as it came, and fails over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from outrider.gateway.answering.candidates.chains import ChainBook, error_of_all, goes_on
from outrider.gateway.answering.candidates.passed_work import (
    COUNTS,
    ELSEWHERE,
    GIVEN,
    PassedSize,
    check_budget,
    json_size,
    number_of_images,
    work_of,
)
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.misplaced_options import (
    refuse_misplaced_options,
    refuse_privacy_header,
)
from outrider.gateway.answering.reading.model_catalog import ResolvedModel
from outrider.gateway.answering.reading.parsed_request import (
    RequestContext,
    check_model,
    tier_not_allowed,
)
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    GatewayError,
    LoopError,
    ModelNotFoundError,
)
from outrider.gateway.contract.schema.common import MAX_END_USER_CHARS, OutriderOptions
from outrider.gateway.contract.schema.forms import FormPart, read_form, write_form
from outrider.gateway.contract.schema.kinds import AUTO, PassedEndpoint
from outrider.gateway.contract.schema.parsing import refuse_doubled_names, validate
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.metering.reserved_usage import UsageEstimate
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.passing import PassedRequest, PassedWork
from outrider.gateway.upstream.redaction import redact
from outrider.gateway.upstream.tier import UpstreamTier

_MAX_HOPS: Final = 8
_JSON: Final = "application/json"
_AUDIO_TYPES: Final = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
_TEXT_FORMATS: Final = frozenset({"text", "srt", "vtt"})
_LABELS: Final = frozenset({"user", "metadata", "safety_identifier"})
_FILES: Final = ("file", *GIVEN)
_NO_OPTIONS: Final = frozenset({"outrider", "models", "privacy", "_charset_"})
"""Fields that a form may not have; the last would have a server read all others otherwise."""
_READ: Final = frozenset(
    {
        *("model", "models", "outrider", "input", "instructions", "documents", "query"),
        *("stream", "stream_format", "response_format", *COUNTS),
    }
)
"""Fields of a body in JSON that are read here."""
_MAX_MODEL_CHARS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRoute:
    """One path of the API."""

    path: str
    endpoint: PassedEndpoint
    """The endpoint that a tier must have."""
    takes_form: bool = False
    """Multipart, else JSON."""


PASSED_ROUTES: Final = (
    PassedRoute(path="/embeddings", endpoint="embeddings"),
    PassedRoute(path="/rerank", endpoint="rerank"),
    PassedRoute(path="/images/generations", endpoint="images"),
    PassedRoute(path="/images/edits", endpoint="images", takes_form=True),
    PassedRoute(path="/images/variations", endpoint="images", takes_form=True),
    PassedRoute(path="/audio/speech", endpoint="audio"),
    PassedRoute(path="/audio/transcriptions", endpoint="audio", takes_form=True),
    PassedRoute(path="/audio/translations", endpoint="audio", takes_form=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswer:
    """A server's answer, the tier that gave it, and the model as the request names it."""

    body: bytes
    content_type: str
    tier: str
    model: str


class _Fields(msgspec.Struct):
    """The fields of a body that decide where it goes."""

    names: tuple[str, ...]
    response_format: str
    end_user: str
    options: OutriderOptions
    size: PassedSize


@dataclass(frozen=True, slots=True, kw_only=True)
class PassThrough:
    """Passes requests on to tiers that have their endpoint."""

    upstream: UpstreamParts
    names: LiveModelCatalog
    chains: ChainBook

    def is_available(self, route: PassedRoute) -> bool:
        """Return whether some tier has the endpoint."""
        return any(self._has(tier, route) for tier in self.upstream.tiers.values())

    async def answer(
        self,
        route: PassedRoute,
        content_type: str,
        body: bytes,
        context: RequestContext,
        model: str | None = None,
    ) -> PassedAnswer:
        """Return the answer of the first model of the request's chain that gives one.

        `model`: in place of a form's own, which its path names.

        Raises GatewayError: one for all models, where none can.
        """
        if self.upstream.gateway_id in context.hops or len(context.hops) >= _MAX_HOPS:
            raise LoopError("The request has come through too many gateways, or through this one.")
        refuse_privacy_header(context.headers)
        form: _Form | _Json = (
            _Form(await read_form(content_type, body), model) if route.takes_form else _Json(body)
        )
        fields = form.fields(route.endpoint)
        self._check_options(fields.options)
        for name in fields.names:
            check_model(context.principal, name)
        if context.meter is not None:
            await context.meter.count_for(fields.end_user)
        links = self.chains.links_of(fields.names)
        errors: list[GatewayError] = []
        for index, link in enumerate(links):
            try:
                resolved = await self._resolved(
                    link.model, fields.options, route, context.principal
                )
                return await self._ask(resolved, route, form, fields, context)
            except GatewayError as error:
                errors.append(error)
                if index + 1 == len(links) or not goes_on(error, link.falls_back_on):
                    raise error_of_all(errors) from error
        raise AssertionError("a chain has a link")

    @staticmethod
    def _check_options(options: OutriderOptions) -> None:
        if options.privacy is not None or options.policy == "local_only":
            raise BadRequestError(
                "outrider: this endpoint is an upstream server's, and the request asks to stay on "
                "this machine.",
                param="outrider",
            )

    async def _resolved(
        self, model: str, options: OutriderOptions, route: PassedRoute, principal: Principal
    ) -> ResolvedModel:
        """Return the tier and the model that a name means here. `auto`: the first tier that can."""
        able = [name for name, t in self.upstream.tiers.items() if self._has(t, route)]
        if not able:
            raise BadRequestError(
                f"/v1{route.path}: no tier of this server has it. Where a tier's server has it, "
                f'its operator sets tiers.NAME.endpoints = ["{route.endpoint}"].',
                code="endpoint_not_available",
            )
        tier = options.tier or (able[0] if model == AUTO else None)
        resolved = await self.names.resolve(model, tier, principal.scopes)
        if resolved.tier not in able and principal.scopes.shown() == "nothing":
            raise BadRequestError(f"model: it has no /v1{route.path}.", param="model")
        if resolved.tier not in able:
            raise BadRequestError(
                f"model: {model[:_MAX_MODEL_CHARS]!r} has no /v1{route.path}; tiers that have it: "
                f"{', '.join(able)}. Name one, or TIER/MODEL.",
                param="model",
            )
        return resolved

    @staticmethod
    def _has(tier: UpstreamTier, route: PassedRoute) -> bool:
        return route.endpoint in tier.settings.endpoints

    async def _ask(
        self,
        resolved: ResolvedModel,
        route: PassedRoute,
        form: "_Form | _Json",
        fields: _Fields,
        context: RequestContext,
    ) -> PassedAnswer:
        assert resolved.tier is not None
        tier = self.upstream.tiers[resolved.tier]
        if not context.principal.scopes.allows_tier(tier.name):
            raise tier_not_allowed(tier.name)
        model = resolved.model or await self.names.usual_model(tier.name)
        if model is None:
            raise ModelNotFoundError(resolved.name, (f"{tier.name}/MODEL",))
        meter = context.meter
        work = work_of(route.path, route.endpoint, fields.size, tier)
        if meter is not None and meter.principal.is_limited:
            check_budget(meter.principal, tier, fields.size, work, meter.tenancy.prices)
            await meter.admit(_estimate(tier, work))
        kind = _content_type(route, fields.response_format)
        content_type, body = form.with_model(model)
        passed = PassedRequest(
            path=route.path,
            content_type=content_type,
            body=body,
            expects_json=kind == _JSON,
            work=work,
        )
        call = UpstreamCall(
            endpoint="completion",
            document={},
            model=model,
            request_id=context.request_id,
            arrival_s=context.arrival_s,
            hops=(*context.hops, self.upstream.gateway_id),
            on_attempt=None if meter is None else meter.on_attempt,
            span=context.span,
            untold=work.usage(),
        )
        answer = tier.pass_on(call, passed)
        try:
            whole = await answer.whole()
        except GatewayError as error:
            redact(error, self.upstream.secrets)
            raise
        finally:
            await answer.aclose()
        return PassedAnswer(
            body=whole.body, content_type=kind, tier=tier.name, model=fields.names[0]
        )


def _estimate(tier: UpstreamTier, work: PassedWork) -> UsageEstimate:
    return UsageEstimate(
        tiers=(tier.name,),
        num_prompt_tokens=work.num_prompt_tokens,
        num_choices=1,
        max_tokens=work.num_completion_tokens,
        is_bounded=True,
        units=work.units,
    )


def _content_type(route: PassedRoute, response_format: str) -> str:
    """Return the type of the answer, by what was asked for: the server's word is not trusted."""
    if route.path == "/audio/speech":
        return _AUDIO_TYPES.get(response_format or "mp3", "application/octet-stream")
    if route.endpoint == "audio" and response_format in _TEXT_FORMATS:
        return "text/plain; charset=utf-8"
    return _JSON


class _Json:
    """A body in JSON."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"The body is not valid JSON: {error}.", code="invalid_json"
            ) from None
        if not isinstance(document, dict):
            raise BadRequestError("body: an object is required.")
        refuse_doubled_names(body)
        refuse_misplaced_options(document)
        _refuse_other_cases(document)
        self._end_user = _end_user_in(document)
        self._document: dict[str, Any] = {
            name: value for name, value in document.items() if name not in _LABELS
        }

    def fields(self, endpoint: PassedEndpoint) -> _Fields:
        """Return what decides where it goes. Raises BadRequestError."""
        document = self._document
        if document.get("stream") or document.get("stream_format") not in (None, "audio"):
            _refuse_stream()
        given = document.get("outrider")
        options = OutriderOptions()
        if given is not None:
            options = validate(OutriderOptions, given, msgspec.json.encode(given))
        response_format = document.get("response_format")
        return _Fields(
            names=ChainBook.names_in(document.get("model"), document.get("models")),
            response_format=response_format if isinstance(response_format, str) else "",
            end_user=self._end_user,
            options=options,
            size=json_size(endpoint, self._sent("")),
        )

    def _sent(self, model: str) -> dict[str, Any]:
        kept = {n: v for n, v in self._document.items() if n not in ("outrider", "models")}
        return {**kept, "model": model}

    def with_model(self, model: str) -> tuple[str, bytes]:
        """Return the content type and the body that names this model."""
        try:
            return _JSON, msgspec.json.encode(self._sent(model))
        except (OverflowError, RecursionError):
            raise BadRequestError("The body has a number of more than 64 bits.") from None


class _Form:
    """A body in parts, with files. Only `model`, `user`, `response_format`, `stream` are read."""

    def __init__(self, parts: Sequence[FormPart], model: str | None = None) -> None:
        if model is not None:
            parts = [_model_part(model), *(p for p in parts if _plain_name(p) != "model")]
        self._parts = parts
        self._by_name: dict[str, list[FormPart]] = {}
        for part in parts:
            self._by_name.setdefault(_plain_name(part), []).append(part)

    def fields(self, endpoint: PassedEndpoint) -> _Fields:
        """Return what decides where it goes. Raises BadRequestError."""
        model = self._value("model")
        if (self._value("stream") or "").lower() not in ("", "false", "0"):
            _refuse_stream()
        for name in _NO_OPTIONS & self._by_name.keys():
            raise BadRequestError(
                f"{name}: a form has no such option; name one model, or an alias for several.",
                param=name,
            )
        return _Fields(
            names=ChainBook.names_in(model, None),
            response_format=self._value("response_format") or "",
            end_user=self._value("user") or "",
            options=OutriderOptions(),
            size=self._size(endpoint),
        )

    def _size(self, endpoint: PassedEndpoint) -> PassedSize:
        """Return the size of its parts: a text, and images or a sound."""
        files = [part for part in self._parts if _plain_name(part).startswith(_FILES)]
        num_file_bytes = sum(len(part.content) for part in files)
        num_bytes = sum(len(part.content) for part in self._parts)
        counts = {name: self._value(name) for name in COUNTS & self._by_name.keys()}
        return PassedSize(
            num_text_tokens=num_bytes - num_file_bytes,
            num_images=number_of_images(counts) if endpoint == "images" else 1,
            num_given=len(files) if endpoint == "images" else 0,
            num_sound_bytes=None if ELSEWHERE & self._by_name.keys() else num_bytes,
        )

    def _value(self, name: str) -> str | None:
        found = self._by_name.get(name, [])
        if not found:
            return None
        if len(found) > 1:
            raise BadRequestError(f"{name}: this part is given twice; give it once.", param=name)
        content = found[0].content
        if len(content) > _MAX_MODEL_CHARS:
            raise BadRequestError(f"{name}: this part is too long.", param=name)
        return bytes(content).decode("utf-8", "replace")

    def with_model(self, model: str) -> tuple[str, bytes]:
        """Return the content type and the body that names this model."""
        named = _model_part(model)
        return write_form(named if _plain_name(p) == "model" else p for p in self._parts)


def _end_user_in(document: Mapping[str, Any]) -> str:
    """Return the end user whom a body names. Raises BadRequestError for one that is too long."""
    for name in ("safety_identifier", "user"):
        if isinstance(end_user := document.get(name), str) and end_user:
            if len(end_user) > MAX_END_USER_CHARS:
                raise BadRequestError(
                    f"{name}: at most {MAX_END_USER_CHARS} characters are allowed.", param=name
                )
            return end_user
    return ""


def _model_part(model: str) -> FormPart:
    return FormPart(name="model", content=model.encode())


def _plain_name(part: FormPart) -> str:
    """Return the name as the least exact of servers may read it: `Model` and `model[]` as model."""
    return part.name.partition("[")[0].lower()


def _refuse_other_cases(document: Mapping[str, Any]) -> None:
    """Refuse `Model` and `N`: servers in Go read them as `model` and `n`, and we do not."""
    for name in document:
        if (plain := name.casefold()) in _READ and name != plain:
            raise BadRequestError(f"{name}: write {plain}, in small letters.", param=name)


def _refuse_stream() -> None:
    raise BadRequestError(
        "stream: answers of this endpoint are not streamed; leave it out.", param="stream"
    )
