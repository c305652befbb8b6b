"""The HTTP application: endpoints, middleware and lifespan over a wired context."""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from engine.errors import EngineError
from gateway.asgi import AnswerResponse, read_json_body
from gateway.context import GatewayContext, GatewayLimits
from gateway.edge.idempotency import IdempotentAnswers
from gateway.entrance import Entrance, principal_of
from gateway.errors import GatewayError, UnavailableError, handle_exception
from gateway.handoff.incoming import Incoming
from gateway.handoff.permissions import check_model
from gateway.handoff.planner import Planner
from gateway.jobs import AUTO, JobBuilder
from gateway.ledger.usage_api import USAGE_MODELS, USAGE_OPERATION, UsageApi
from gateway.loop_lag import LoopLag
from gateway.metering.meter import Account, RequestMeter
from gateway.metering.tenancy import Tenancy
from gateway.openapi import (
    LoadedLimits,
    build_document,
    generation_operation,
    operation,
    question_operation,
)
from gateway.request_watch import RequestWatch, Watched
from gateway.route_metrics import RouteCollector
from gateway.schema.chat import ChatRequest
from gateway.schema.completions import CompletionRequest
from gateway.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    ModelCard,
    ModelList,
    Readiness,
)
from gateway.schema.routing import RouteReport
from gateway.surfaces.messages.answers import MESSAGES_MODELS
from gateway.surfaces.messages.openapi import count_tokens_operation, messages_operation
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.prices import with_prices
from gateway.surfaces.responses.answers import RESPONSES_MODELS
from gateway.surfaces.responses.openapi import responses_operation
from gateway.surfaces.responses.surface import ResponsesSurface
from gateway.surfaces.surface import Surface
from gateway.surfaces.tokenize import Tokenizing
from gateway.surfaces.tokenize_api import detokenize_operation, tokenize_operation
from gateway.surfaces.tokenize_schema import TOKENIZE_MODELS
from gateway.telemetry.log_context import log_context
from gateway.telemetry.tracer import NULL_SPAN, Span
from gateway.tenants.admin import AdminApi
from gateway.tenants.admin_routes import ADMIN_ROUTES
from gateway.tenants.admin_schema import ADMIN_MODELS
from gateway.tenants.principal import Principal
from gateway.upstream.call import HOPS_HEADER, Endpoint

__all__ = ["GatewayContext", "GatewayLimits", "create_app"]

logger = logging.getLogger(__name__)

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"
_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_TOKENIZE: Final = "/v1/tokenize"
_DETOKENIZE: Final = "/v1/detokenize"
_OTHER_MODELS: Final = (
    *RESPONSES_MODELS,
    *MESSAGES_MODELS,
    *TOKENIZE_MODELS,
    *USAGE_MODELS,
    *ADMIN_MODELS,
)
_MAX_ADMIN_BODY_BYTES: Final = 64 * 2**10
_STATS_TIMEOUT_S: Final = 2.0
_HOP: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Gateway:
    """The endpoints and what they share."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self.metrics = context.metrics
        if context.routing.guard is not None:
            self.metrics.registry.register(RouteCollector(context.routing.guard))
        self.jobs = JobBuilder(context, self.metrics)
        self.planner = Planner(context, self.jobs)
        self.responses_surface = ResponsesSurface(clock=context.wall_clock)
        self.messages_surface = MessagesSurface(has_tiers_elsewhere=bool(context.cloud.tiers))
        self._tokenizing = Tokenizing(context, self.jobs)
        self._idempotent = IdempotentAnswers.of(context.http, context.clock, context.edge_metrics)
        self._loop_lag = LoopLag(self.metrics.registry)
        self._page = resources.files("gateway").joinpath("static/index.html").read_bytes()

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Load the engine behind the open port, so that /health and /ready answer meanwhile."""
        tiers = self.context.cloud.tiers.values()
        background = [
            asyncio.create_task(self._start_engine()),
            asyncio.create_task(self._loop_lag.run()),
        ]
        try:
            await self.context.tenancy.start()
            for tier in tiers:
                await tier.start()
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            if self.context.cloud.mirror is not None:
                await self.context.cloud.mirror.close()
            for tier in tiers:
                await tier.close()
            await self.context.engine.close()
            await self.context.tenancy.close()
            await self.context.capture.close()
            await self.context.tracer.close()

    async def _start_engine(self) -> None:
        try:
            await self.context.engine.start()
            if self.context.routing.pair is not None:
                await self.jobs.engine_info()  # whether these are the models of the router
        except Exception as error:  # noqa: BLE001 - kept: /ready tells it
            self.jobs.start_error = error
            logger.error("engine failed to start error=%s message=%s", type(error).__name__, error)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer("chat", request)

    async def completions(self, request: Request) -> Response:
        """Continue text or token ids, without a chat template."""
        return await self._answer("completion", request)

    async def responses(self, request: Request) -> Response:
        """Answer in the words of OpenAI's Responses API."""
        return await self._answer("chat", request, self.responses_surface)

    async def messages(self, request: Request) -> Response:
        """Answer in the words of Anthropic's Messages API."""
        return await self._answer("chat", request, self.messages_surface)

    async def _answer(
        self, endpoint: Endpoint, request: Request, surface: Surface | None = None
    ) -> Response:
        clock = self.context.clock
        arrival_s = clock()
        body = await self._body(request)

        async def answered() -> Response:
            name = surface.name if surface else endpoint
            watch = self._watch(request, name, arrival_s, body)
            meter = self._meter(request, name, arrival_s, watch.span)
            with watch:
                translated = None if surface is None else surface.read(body)
                plan = await self.planner.plan(
                    endpoint,
                    body if translated is None else translated.chat_body,
                    _incoming(request, arrival_s, meter, watch.span),
                )
            meter.is_streamed = plan.is_streamed
            watch.planned(is_private=plan.is_private, is_streamed=plan.is_streamed)
            return AnswerResponse(
                plan.answering,
                is_streamed=plan.is_streamed,
                clock=clock,
                meter=meter,
                writer=None if translated is None else translated.writer,
                watch=watch,
            )

        owner = principal_of(request).key_id
        return await self._idempotent.answer(request, body, answered, owner=owner)

    def _watch(
        self, request: Request, endpoint: str, arrival_s: float, body: bytes
    ) -> RequestWatch:
        """Who follows the request for operators; its trace begins here, or goes on."""
        context, headers = self.context, request.headers
        span = context.tracer.begin(
            f"POST {request.scope['path']}",
            traceparent=headers.get("traceparent"),
            tracestate=headers.get("tracestate"),
            start_s=arrival_s,
        )
        if span.trace_id and (logged := log_context()) is not None:
            logged.trace_id = span.trace_id
        watched = Watched(
            request_id=request.state.request_id,
            key_id=principal_of(request).key_id,
            endpoint=endpoint,
            body=body,
        )
        return RequestWatch(watched, span, context.capture, context.wall_clock)

    def _meter(
        self, request: Request, endpoint: str, arrival_s: float, span: Span = NULL_SPAN
    ) -> RequestMeter:
        context = self.context
        account = Account(
            principal=principal_of(request),
            request_id=secrets.token_hex(12),
            client_request_id=request.state.request_id,
            endpoint=endpoint,
            arrival_s=arrival_s,
        )
        return RequestMeter(
            context.tenancy,
            account,
            clock=context.clock,
            wall_clock=context.wall_clock,
            span=span,
        )

    async def _counted(
        self, request: Request, work: Callable[[bytes, Principal], Awaitable[Response]]
    ) -> Response:
        """What writes no answer is a request all the same."""
        arrival_s = self.context.clock()
        body = await self._body(request)
        meter = self._meter(request, request.url.path, arrival_s)
        await meter.count()
        try:
            response = await work(body, principal_of(request))
            response.headers.update(meter.headers)
            return response
        finally:
            await meter.finish("answered")

    async def route(self, request: Request) -> Response:
        """Where a request would go, without answering it."""

        async def report(body: bytes, principal: Principal) -> Response:
            del principal
            incoming = _incoming(request, self.context.clock())
            told = await self.planner.route_report(_endpoint_of(body), body, incoming)
            return _json_response(told)

        return await self._counted(request, report)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        return await self._counted(request, self._tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._counted(request, self._tokenizing.detokenize)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a request in the words of the Messages API has."""
        return await self._counted(request, self._tokenizing.count_tokens)

    async def models(self, request: Request) -> Response:
        """The names that `model` accepts, of this key."""
        names = await self.planner.names()
        scopes = principal_of(request).scopes
        prices = self.context.tenancy.prices
        cards = [
            with_prices(card, prices) for card in names.cards() if scopes.allows_model(card["id"])
        ]
        return _json_response({"object": "list", "data": cards})

    async def model(self, model_id: str, request: Request) -> Response:
        """One of the names that `model` accepts."""
        check_model(principal_of(request), model_id)
        names = await self.planner.names()
        return _json_response(with_prices(names.card(model_id), self.context.tenancy.prices))

    async def health(self) -> Response:
        """The process is alive."""
        return _json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Whether a request would be served now."""
        cloud = self.context.cloud
        has_cloud = cloud.rules.policy != "local_only" and any(
            tier.is_available for tier in cloud.tiers.values()
        )
        if not has_cloud and not cloud.rules.has_local:
            waits_s = [tier.retry_after_s for tier in cloud.tiers.values()]
            raise UnavailableError(
                "No tier elsewhere takes requests now, and no model is loaded on this machine.",
                retry_after_s=min(waits_s),
            )
        if not has_cloud:
            await self.jobs.engine_info()
        return _json_response({"ready": True})

    async def expose_metrics(self) -> Response:
        """Prometheus text."""
        stats = None
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await self.context.engine.stats() if self.context.engine.is_ready else None
        except (TimeoutError, EngineError) as error:
            logger.warning("no engine statistics error=%s", type(error).__name__)
        return Response(self.metrics.exposition(stats), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """The playground."""
        return HTMLResponse(self._page, headers={"content-security-policy": _PAGE_POLICY})

    async def limits(self) -> LoadedLimits | None:
        """What the loaded models allow; None while the engine is not ready."""
        try:
            names = await self.jobs.names()
        except (GatewayError, EngineError):
            return None
        tiers = names[AUTO]
        if not tiers:
            return None
        return LoadedLimits(
            names=None if self.context.cloud.tiers else tuple(names),
            max_context=max(info.max_context for info in tiers),
            vocab_size=max(info.vocab_size for info in tiers),
        )

    async def _body(self, request: Request) -> bytes:
        return await read_json_body(request, limit_bytes=self.context.limits.max_body_bytes)


def create_app(context: GatewayContext) -> Entrance:
    """The gateway over an engine that need not be started: the app's lifespan does that."""
    gateway = Gateway(context)
    app = FastAPI(
        title="Outrider",
        version="0.1.0",
        description="The OpenAI API over a small and a large model that work together.",
        lifespan=gateway.lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    _add_routes(app, gateway)
    for kind in (GatewayError, EngineError, HTTPException):
        app.add_exception_handler(kind, handle_exception)
    messages_problem = gateway.messages_surface.problem_body
    return Entrance(
        app,
        {
            _CHAT: gateway.chat,
            _COMPLETIONS: gateway.completions,
            _RESPONSES: gateway.responses,
            _MESSAGES: gateway.messages,
            _COUNT_TOKENS: gateway.count_tokens,
        },
        authenticate=context.tenancy.keys.authenticator.authenticate,
        problem_bodies={
            _RESPONSES: gateway.responses_surface.problem_body,
            _MESSAGES: messages_problem,
            _COUNT_TOKENS: messages_problem,
        },
    )


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    chat = generation_operation(ChatRequest, ChatCompletion, ChatCompletionChunk, "createChat")
    completion = generation_operation(CompletionRequest, Completion, Completion, "createCompletion")
    route = question_operation(
        (ChatRequest, CompletionRequest), RouteReport, "Where it would go.", "route"
    )
    get = app.get
    app.post(_CHAT, openapi_extra=chat)(gateway.chat)
    app.post(_COMPLETIONS, openapi_extra=completion)(gateway.completions)
    app.post(_RESPONSES, openapi_extra=responses_operation())(gateway.responses)
    app.post(_MESSAGES, openapi_extra=messages_operation())(gateway.messages)
    app.post(_COUNT_TOKENS, openapi_extra=count_tokens_operation())(gateway.count_tokens)
    app.post(_TOKENIZE, openapi_extra=tokenize_operation())(gateway.tokenize)
    app.post(_DETOKENIZE, openapi_extra=detokenize_operation())(gateway.detokenize)
    app.post("/v1/route", openapi_extra=route)(gateway.route)
    get(
        "/v1/models",
        openapi_extra=operation(ModelList, "All names.", 503, operation_id="listModels"),
    )(gateway.models)
    get(
        "/v1/models/{model_id:path}",
        openapi_extra=operation(ModelCard, "One name.", 404, 503, operation_id="getModel"),
    )(gateway.model)
    get("/health", openapi_extra=operation(Health, "Alive.", operation_id="health"))(gateway.health)
    get(
        "/ready",
        openapi_extra=operation(Readiness, "Ready.", 503, operation_id="ready"),
    )(gateway.ready)
    get("/metrics", include_in_schema=False)(gateway.expose_metrics)
    get("/", include_in_schema=False)(gateway.page)

    _add_tenant_routes(app, gateway.context.tenancy)

    async def openapi_document() -> Response:
        limits = await gateway.limits()
        has_tiers = bool(gateway.context.cloud.tiers)
        document = build_document(app, limits, models=_OTHER_MODELS, has_tiers_elsewhere=has_tiers)
        return _json_response(document)

    get("/openapi.json", include_in_schema=False)(openapi_document)


def _add_tenant_routes(app: FastAPI, tenancy: Tenancy) -> None:
    """What tenants may ask of themselves, and administrators of them."""
    usage = UsageApi(tenancy.database)
    admin = AdminApi(tenancy.keys, _read_small_body)
    app.get("/v1/usage", openapi_extra=USAGE_OPERATION)(_with_principal(usage.usage))
    for route in ADMIN_ROUTES:
        app.add_api_route(
            route.path,
            _with_principal(getattr(admin, route.handler)),
            methods=[route.method],
            openapi_extra=route.operation,
        )


async def _read_small_body(request: Request) -> bytes:
    return await read_json_body(request, limit_bytes=_MAX_ADMIN_BODY_BYTES)


def _with_principal(
    handler: Callable[[Request, Principal], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, principal_of(request))

    return endpoint


def _incoming(
    request: Request,
    arrival_s: float,
    meter: RequestMeter | None = None,
    span: Span = NULL_SPAN,
) -> Incoming:
    """What came with the body."""
    headers = request.headers
    told = ",".join(headers.getlist(HOPS_HEADER)).split(",")
    # What is no gateway's id is not sent on: the header goes to servers elsewhere.
    hops = tuple(hop for part in told if _HOP.fullmatch(hop := part.strip()))
    return Incoming(
        arrival_s=arrival_s,
        request_id=request.state.request_id,
        hops=hops,
        with_trace=headers.get("x-outrider-trace") == "1",
        principal=principal_of(request),
        meter=meter,
        span=span,
    )


def _endpoint_of(body: bytes) -> Endpoint:
    """Which endpoint's request a body is; what is neither is refused as a chat."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    is_completion = isinstance(document, dict) and "prompt" in document
    return "completion" if is_completion and "messages" not in document else "chat"


def _json_response(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
