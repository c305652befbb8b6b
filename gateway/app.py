"""The HTTP application: endpoints, middleware and lifespan over a wired context."""

import asyncio
import logging
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
from engine.events import TierInfo
from gateway.asgi import GenerationResponse, RequestIdMiddleware, parse, read_json_body
from gateway.context import GatewayContext, GatewayLimits
from gateway.errors import GatewayError, ModelNotFoundError, NotReadyError, handle_exception
from gateway.generation import Generation
from gateway.jobs import AUTO, JobBuilder
from gateway.metrics import GatewayMetrics
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
from gateway.sse import ChatFormat, CompletionFormat

__all__ = ["GatewayContext", "GatewayLimits", "create_app"]

logger = logging.getLogger(__name__)

# Clients sort models by age; ours have none that would mean anything.
_CREATED: Final = 1_762_000_000
_STATS_TIMEOUT_S: Final = 2.0
_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


class Gateway:
    """The endpoints and what they share."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self.metrics = GatewayMetrics()
        if context.routing.guard is not None:
            self.metrics.registry.register(RouteCollector(context.routing.guard))
        self.jobs = JobBuilder(context, self.metrics)
        self.start_error: Exception | None = None
        self._page = resources.files("gateway").joinpath("static/index.html").read_bytes()

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Load the engine behind the open port, so that /health and /ready answer meanwhile."""
        starting = asyncio.create_task(self._start_engine())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.wait([starting])
            await self.context.engine.close()

    async def _start_engine(self) -> None:
        try:
            await self.context.engine.start()
            if self.context.routing.pair is not None:
                await self.jobs.engine_info()  # whether these are the models of the router
        except Exception as error:  # noqa: BLE001 - kept: /ready tells it
            self.start_error = error
            logger.error("engine failed to start error=%s message=%s", type(error).__name__, error)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrival_s = self.context.clock()
        body = await self._body(request)
        chat = parse(ChatRequest, body)
        self._check_started()
        job = await self.jobs.chat_job(chat, arrival_s)
        return self._respond(
            request, chat, Generation(self.context.engine, job, self.metrics, self.context.clock)
        )

    async def completions(self, request: Request) -> Response:
        """Continue text or token ids, without a chat template."""
        arrival_s = self.context.clock()
        body = await self._body(request)
        completion = parse(CompletionRequest, body)
        self._check_started()
        job = await self.jobs.completion_job(completion, arrival_s)
        return self._respond(
            request,
            completion,
            Generation(self.context.engine, job, self.metrics, self.context.clock),
        )

    async def route(self, request: Request) -> Response:
        """Where a request would go, without answering it."""
        body = await self._body(request)
        asked = parse(_kind_of(body), body)
        self._check_started()
        return _json_response(await self.jobs.route_report(asked))

    async def models(self) -> Response:
        """The names that `model` accepts."""
        names = await self.jobs.names()
        cards = [_card(name, tiers) for name, tiers in names.items()]
        return _json_response({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        """One of the names that `model` accepts."""
        names = await self.jobs.names()
        if model_id not in names:
            raise ModelNotFoundError(model_id, list(names))
        return _json_response(_card(model_id, names[model_id]))

    async def health(self) -> Response:
        """The process is alive."""
        return _json_response({"status": "ok"})

    async def ready(self) -> Response:
        """Whether a request would be served now."""
        self._check_started()
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
        return LoadedLimits(
            names=tuple(names),
            max_context=max(info.max_context for info in tiers),
            vocab_size=max(info.vocab_size for info in tiers),
        )

    def _check_started(self) -> None:
        """Raise NotReadyError with the reason when the engine could not be loaded at all."""
        if self.start_error is not None and not self.context.engine.is_ready:
            raise NotReadyError(f"The engine failed to start: {self.start_error}")

    async def _body(self, request: Request) -> bytes:
        return await read_json_body(request, limit_bytes=self.context.limits.max_body_bytes)

    def _respond(
        self,
        request: Request,
        parsed: ChatRequest | CompletionRequest,
        generation: Generation,
    ) -> Response:
        form = ChatFormat if isinstance(parsed, ChatRequest) else CompletionFormat
        return GenerationResponse(
            generation,
            form(generation.job.tokenizer, parsed.top_count),
            stream=bool(parsed.stream),
            with_usage=parsed.wants_usage_chunk,
            with_trace=request.headers.get("x-outrider-trace") == "1",
        )


def create_app(context: GatewayContext) -> FastAPI:
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
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    chat = generation_operation(ChatRequest, ChatCompletion, ChatCompletionChunk, "createChat")
    completion = generation_operation(CompletionRequest, Completion, Completion, "createCompletion")
    route = question_operation(
        (ChatRequest, CompletionRequest), RouteReport, "Where it would go.", "route"
    )
    get = app.get
    app.post("/v1/chat/completions", openapi_extra=chat)(gateway.chat)
    app.post("/v1/completions", openapi_extra=completion)(gateway.completions)
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
        return _json_response(build_document(app, await gateway.limits()))

    get("/openapi.json", include_in_schema=False)(openapi_document)


def _kind_of(body: bytes) -> type[ChatRequest] | type[CompletionRequest]:
    """Which endpoint's request a body is; what is neither is refused as a chat."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ChatRequest
    is_completion = isinstance(document, dict) and "prompt" in document
    return CompletionRequest if is_completion and "messages" not in document else ChatRequest


def _json_response(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _card(name: str, tiers: tuple[TierInfo, ...]) -> dict[str, Any]:
    """A model as GET /v1/models lists it."""
    fields = ("tier", "model_id", "max_context", "num_parameters", "dtype", "device")
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "outrider",
        "outrider": [{field: getattr(info, field) for field in fields} for info in tiers],
    }
