"""The endpoints, and what they share."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.events import EngineStats
from gateway.apis.messages.surface import MessagesSurface
from gateway.apis.prices import with_prices
from gateway.apis.responses.surface import ResponsesSurface
from gateway.apis.surface import Surface
from gateway.apis.tokenize import Tokenizing
from gateway.dashboard.api import DashboardApi, DashboardSources
from gateway.dashboard.experiments import experiment_documents
from gateway.dashboard.recent import RecentOutcomes
from gateway.edge.bodies import BodyBudget
from gateway.edge.idempotency import IdempotentAnswers
from gateway.edge.json_body import read_json_body
from gateway.errors.http import Problem
from gateway.errors.tree import GatewayError, UnavailableError
from gateway.handoff.planner import Planner
from gateway.metering.meter import Account, RequestMeter
from gateway.metering.outcome_record import OutcomeRecord
from gateway.planning.context import GatewayContext
from gateway.planning.incoming import Incoming
from gateway.planning.jobs import AUTO, JobBuilder
from gateway.planning.permissions import check_model
from gateway.schema.kinds import Endpoint
from gateway.schema.openapi import (
    LoadedLimits,
)
from gateway.server.entrance import principal_of
from gateway.server.pages import WebPage, load_page
from gateway.server.request_watch import RequestWatch, Watched
from gateway.server.responses import AnswerResponse, WorkResponse
from gateway.server.route_metrics import RouteCollector
from gateway.telemetry.log_context import log_context
from gateway.telemetry.loop_lag import LoopLag
from gateway.telemetry.tracer import NULL_SPAN, Span
from gateway.tenants.principal import ANONYMOUS, Principal
from gateway.upstream.call import HOPS_HEADER

logger = logging.getLogger(__name__)

PLAYGROUND_PATHS: Final = ("/", "/playground")
DASHBOARD_PATH: Final = "/dashboard"

_STATS_TIMEOUT_S: Final = 2.0
MAX_SMALL_BODY_BYTES: Final = 2**20
"""Of a body that holds no prompt."""
_HOP: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Gateway:
    """The endpoints and what they share."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self.metrics = context.metrics
        if context.routing.guard is not None:
            self.metrics.registry.register(RouteCollector(context.routing.guard))
        self.jobs = JobBuilder(context, self.metrics)
        self.planner = Planner(context, self.jobs)
        has_tiers = bool(context.cloud.tiers)
        self.responses_surface = ResponsesSurface(
            has_tiers_elsewhere=has_tiers, clock=context.wall_clock
        )
        self.messages_surface = MessagesSurface(has_tiers_elsewhere=has_tiers)
        self._tokenizing = Tokenizing(context, self.jobs)
        self._idempotent = IdempotentAnswers.of(context.http, context.clock, context.edge_metrics)
        self._bodies = BodyBudget(
            max_bytes=context.http.max_bytes_in_flight,
            max_bytes_per_owner=context.http.max_bytes_in_flight_per_key,
            metrics=context.edge_metrics,
        )
        recent = RecentOutcomes(clock=context.clock)
        self._sinks = (*context.experiments.sinks, context.slo.goodput, recent)
        self.dashboard = DashboardApi(
            DashboardSources(
                recent=recent,
                classes=context.slo.classes.settings,
                read_stats=self._stats,
                clock=context.clock,
                wall_clock=context.wall_clock,
                read_experiments=partial(experiment_documents, context.experiments),
            )
        )
        self._loop_lag = LoopLag(self.metrics.registry)
        self._page = load_page("index.html")
        self._dashboard_page = load_page("dashboard.html")

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
            await self.context.experiments.start()
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
            await self.dashboard.close()
            await self.context.experiments.close()
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
        arrival_s = self.context.clock()
        record = self._record(arrival_s)
        meter = self._meter(request, surface.name if surface else endpoint, arrival_s, record)
        record.identify(meter.account)
        principal = principal_of(request)
        keep = partial(self._idempotent.answer, owner=principal.key_id, tenant=principal.tenant)

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            async with self._entered(request, meter, record) as body:
                make = partial(self._planned, endpoint, request, body, surface, meter, record)
                response = await keep(request, body, make)
                await response(scope, receive, send)

        return WorkResponse(work)

    async def _planned(
        self,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        surface: Surface | None,
        meter: RequestMeter,
        record: OutcomeRecord,
    ) -> Response:
        """The answer to a request that is counted and read."""
        watch = self._watch(request, meter.account, body, record)
        meter.span = watch.span
        with watch:
            translated = None if surface is None else surface.read(body)
            plan = await self.planner.plan(
                endpoint,
                body if translated is None else translated.chat_body,
                _incoming(request, meter.account.arrival_s, meter, watch.span, record),
            )
        meter.is_streamed = record.is_streamed = plan.is_streamed
        watch.planned(is_private=plan.is_private, is_streamed=plan.is_streamed)
        return AnswerResponse(
            plan.answering,
            is_streamed=plan.is_streamed,
            clock=self.context.clock,
            meter=meter,
            writer=None if translated is None else translated.writer,
            watch=watch,
        )

    @asynccontextmanager
    async def _entered(
        self,
        request: Request,
        meter: RequestMeter,
        record: OutcomeRecord | None = None,
        limit_bytes: int | None = None,
    ) -> AsyncIterator[bytes]:
        """The body of a request that limits have counted; both end with the context.

        A request that ends without an answer of its own (a repeated one) gives its count back, and
        so does one that fails through no fault of its own.
        """
        try:
            await meter.enter()
        except GatewayError as error:
            if record is not None:
                self._watch(request, meter.account, b"", record).ended(None, "failed", None, error)
            raise
        try:
            with self._bodies.hold(_owner_of(request)) as held:
                most = limit_bytes or self.context.limits.max_body_bytes
                bounds = self.context.limits.json_bounds
                yield await read_json_body(request, limit_bytes=most, held=held, bounds=bounds)
            await meter.finish("failed")
        except Exception as error:
            meter.failed_by(error)
            await meter.finish("failed")
            raise
        finally:
            meter.end("failed")

    def _record(self, arrival_s: float) -> OutcomeRecord:
        """What those who count get to know of the request."""
        context = self.context
        return OutcomeRecord(
            self._sinks, arrival_s=arrival_s, clock=context.clock, wall_clock=context.wall_clock
        )

    def _watch(
        self, request: Request, account: Account, body: bytes, record: OutcomeRecord
    ) -> RequestWatch:
        """Who follows the request for operators; its trace begins here, or goes on."""
        context, headers = self.context, request.headers
        span = context.tracer.begin(
            f"POST {request.scope['path']}",
            traceparent=headers.get("traceparent"),
            tracestate=headers.get("tracestate"),
            start_s=account.arrival_s,
        )
        if span.trace_id and (logged := log_context()) is not None:
            logged.trace_id = span.trace_id
        watched = Watched(
            request_id=request.state.request_id,
            key_id=account.principal.key_id,
            endpoint=account.endpoint,
            body=body,
        )
        return RequestWatch(watched, span, context.capture, context.wall_clock, record)

    def _meter(
        self,
        request: Request,
        endpoint: str,
        arrival_s: float,
        record: OutcomeRecord | None = None,
    ) -> RequestMeter:
        context = self.context
        account = Account(
            principal=principal_of(request),
            request_id=context.tenancy.row_ids.next(),
            client_request_id=request.state.request_id,
            endpoint=endpoint,
            arrival_s=arrival_s,
        )
        return RequestMeter(
            context.tenancy,
            account,
            clock=context.clock,
            wall_clock=context.wall_clock,
            on_booked=None if record is None else record.booked,
        )

    async def counted(
        self,
        request: Request,
        work: Callable[[bytes, Principal], Awaitable[Response]],
        *,
        limit_bytes: int | None = None,
    ) -> Response:
        """Do what writes no answer; limits count it as a request all the same.

        `limit_bytes`: of its body, where that is not the settings'.
        """
        meter = self._meter(request, request.scope["path"], self.context.clock())
        async with self._entered(request, meter, limit_bytes=limit_bytes) as body:
            response = await work(body, principal_of(request))
            response.headers.update(meter.headers)
            await meter.finish("answered")
        return response

    async def route(self, request: Request) -> Response:
        """Where a request would go, without answering it."""

        async def report(body: bytes, principal: Principal) -> Response:
            del principal
            incoming = _incoming(request, self.context.clock())
            told = await self.planner.route_report(_endpoint_of(body), body, incoming)
            return json_response(told)

        return await self.counted(request, report)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        return await self.counted(request, self._tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self.counted(request, self._tokenizing.detokenize)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a request in the words of the Messages API has."""
        return await self.counted(request, self._tokenizing.count_tokens)

    async def models(self, request: Request) -> Response:
        """The names that `model` accepts, of this key."""
        names = await self.planner.names()
        scopes = principal_of(request).scopes
        prices = self.context.tenancy.prices
        cards = [
            with_prices(card, prices) for card in names.cards() if scopes.allows_model(card["id"])
        ]
        return json_response({"object": "list", "data": cards})

    async def model(self, model_id: str, request: Request) -> Response:
        """One of the names that `model` accepts."""
        check_model(principal_of(request), model_id)
        names = await self.planner.names()
        return json_response(with_prices(names.card(model_id), self.context.tenancy.prices))

    async def health(self) -> Response:
        """The process is alive."""
        return json_response({"status": "ok"})

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
        return json_response({"ready": True})

    async def expose_metrics(self, request: Request) -> Response:
        """Prometheus text, for keys with the metrics scope where keys are required."""
        keys = self.context.tenancy.keys
        if not keys.has_open_metrics:
            keys.authenticator.require_metrics(principal_of(request))
        stats = None
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await self._stats()
        except (TimeoutError, EngineError) as error:
            logger.warning("no engine statistics error=%s", type(error).__name__)
        return Response(self.metrics.exposition(stats), media_type=CONTENT_TYPE_LATEST)

    async def _stats(self) -> EngineStats | None:
        """The engine's snapshot; None while it is not there. Raises EngineError."""
        return await self.context.engine.stats() if self.context.engine.is_ready else None

    async def page(self) -> Response:
        """The playground."""
        return self._page.response()

    async def dashboard_page(self) -> Response:
        """The dashboard."""
        return self._dashboard_page.response()

    @property
    def sign_in(self) -> dict[str, Callable[[Problem], Response]]:
        """The pages for who has no key yet: they hold no secrets, and ask for one."""

        def shown(page: WebPage, problem: Problem) -> Response:
            return page.response(problem.status, problem.headers)

        pages = dict.fromkeys(PLAYGROUND_PATHS, self._page)
        pages[DASHBOARD_PATH] = self._dashboard_page
        return {path: partial(shown, page) for path, page in pages.items()}

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

    async def read_small_body(self, request: Request) -> bytes:
        """Read the body of a request that administrators make. Raises GatewayError."""
        with self._bodies.hold(_owner_of(request)) as held:
            return await read_json_body(
                request,
                limit_bytes=MAX_SMALL_BODY_BYTES,
                held=held,
                bounds=self.context.limits.json_bounds,
            )


def _owner_of(request: Request) -> str:
    """Whose share of bytes a body takes: the key's, or the address's where there is no key."""
    principal = principal_of(request)
    if principal.key_id != ANONYMOUS.key_id:
        return principal.key_id
    return f"address {request.client.host if request.client else '-'}"


def _incoming(
    request: Request,
    arrival_s: float,
    meter: RequestMeter | None = None,
    span: Span = NULL_SPAN,
    record: OutcomeRecord | None = None,
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
        outcome=record,
        headers=headers,
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


def json_response(content: dict[str, Any]) -> Response:
    """A success."""
    return Response(msgspec.json.encode(content), media_type="application/json")
