"""The HTTP application: endpoints, middleware and lifespan over a wired context."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from engine.errors import EngineError
from gateway.asgi import AnswerResponse, RequestIdMiddleware, read_json_body
from gateway.context import GatewayContext, GatewayLimits
from gateway.errors import GatewayError, UnavailableError, handle_exception
from gateway.fast_lane import FastLane
from gateway.handoff.incoming import Incoming
from gateway.handoff.planner import Planner
from gateway.jobs import AUTO, JobBuilder
from gateway.loop_lag import LoopLag
from gateway.openapi import (
    LoadedLimits,
    build_document,
    generation_operation,
    operation,
    question_operation,
)
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
from gateway.upstream.call import HOPS_HEADER, Endpoint

__all__ = ["GatewayContext", "GatewayLimits", "create_app"]

logger = logging.getLogger(__name__)

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_STATS_TIMEOUT_S: Final = 2.0
_HOP: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
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

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        clock = self.context.clock
        arrival_s = clock()
        body = await self._body(request)
        plan = await self.planner.plan(endpoint, body, _incoming(request, arrival_s))
        return AnswerResponse(plan.answering, is_streamed=plan.is_streamed, clock=clock)

    async def route(self, request: Request) -> Response:
        """Where a request would go, without answering it."""
        arrival_s = self.context.clock()
        body = await self._body(request)
        report = await self.planner.route_report(
            _endpoint_of(body), body, _incoming(request, arrival_s)
        )
        return _json_response(report)

    async def models(self) -> Response:
        """The names that `model` accepts."""
        names = await self.planner.names()
        return _json_response({"object": "list", "data": names.cards()})

    async def model(self, model_id: str) -> Response:
        """One of the names that `model` accepts."""
        names = await self.planner.names()
        return _json_response(names.card(model_id))

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


def create_app(context: GatewayContext) -> FastLane:
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
    app.add_middleware(RequestIdMiddleware)
    return FastLane(app, {_CHAT: gateway.chat, _COMPLETIONS: gateway.completions})


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    chat = generation_operation(ChatRequest, ChatCompletion, ChatCompletionChunk, "createChat")
    completion = generation_operation(CompletionRequest, Completion, Completion, "createCompletion")
    route = question_operation(
        (ChatRequest, CompletionRequest), RouteReport, "Where it would go.", "route"
    )
    get = app.get
    app.post(_CHAT, openapi_extra=chat)(gateway.chat)
    app.post(_COMPLETIONS, openapi_extra=completion)(gateway.completions)
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

    async def openapi_document() -> Response:
        limits = await gateway.limits()
        has_tiers = bool(gateway.context.cloud.tiers)
        return _json_response(build_document(app, limits, has_tiers_elsewhere=has_tiers))

    get("/openapi.json", include_in_schema=False)(openapi_document)


def _incoming(request: Request, arrival_s: float) -> Incoming:
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
