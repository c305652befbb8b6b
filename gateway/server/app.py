"""The HTTP application: where its endpoints are, and how they are described."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import EngineError
from gateway.apis.messages.answers import MESSAGES_MODELS
from gateway.apis.messages.openapi import count_tokens_operation, messages_operation
from gateway.apis.responses.answers import RESPONSES_MODELS
from gateway.apis.responses.openapi import responses_operation
from gateway.apis.tokenize_api import detokenize_operation, tokenize_operation
from gateway.apis.tokenize_schema import TOKENIZE_MODELS
from gateway.dashboard.schema import DASHBOARD_MODELS, Dashboard
from gateway.errors.http import handle_exception
from gateway.errors.tree import GatewayError
from gateway.experiments.admin import ExperimentApi
from gateway.experiments.admin_routes import EXPERIMENT_ROUTES
from gateway.experiments.admin_schema import EXPERIMENT_MODELS
from gateway.experiments.feedback import FeedbackApi
from gateway.experiments.feedback_schema import FEEDBACK_MODELS, FEEDBACK_OPERATION
from gateway.handoff.arm_check import arm_check
from gateway.ledger.usage_api import USAGE_MODELS, USAGE_OPERATION, UsageApi
from gateway.planning.context import GatewayContext, GatewayLimits
from gateway.schema.chat import ChatRequest
from gateway.schema.completions import CompletionRequest
from gateway.schema.openapi import (
    generation_operation,
    operation,
    question_operation,
)
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
from gateway.server.endpoints import (
    DASHBOARD_PATH,
    MAX_SMALL_BODY_BYTES,
    PLAYGROUND_PATHS,
    Gateway,
)
from gateway.server.entrance import FREE_PATHS, Entrance, principal_of
from gateway.server.openapi_document import OpenApiEndpoint
from gateway.tenants.admin import AdminApi
from gateway.tenants.admin_routes import ADMIN_ROUTES
from gateway.tenants.admin_schema import ADMIN_MODELS
from gateway.tenants.principal import Principal

__all__ = ["GatewayContext", "GatewayLimits", "create_app"]

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"
_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_TOKENIZE: Final = "/v1/tokenize"
_DETOKENIZE: Final = "/v1/detokenize"
_METRICS: Final = "/metrics"
_OTHER_MODELS: Final = (
    *RESPONSES_MODELS,
    *MESSAGES_MODELS,
    *TOKENIZE_MODELS,
    *USAGE_MODELS,
    *ADMIN_MODELS,
    *DASHBOARD_MODELS,
    *EXPERIMENT_MODELS,
    *FEEDBACK_MODELS,
)


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
        redirect_slashes=False,  # a redirect would be made from the client's own host header
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
        sign_in=gateway.sign_in,
        free_paths=FREE_PATHS | ({_METRICS} if context.tenancy.keys.has_open_metrics else set()),
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
    get(_METRICS, include_in_schema=False)(gateway.expose_metrics)
    for path in PLAYGROUND_PATHS:
        get(path, include_in_schema=False)(gateway.page)
    get(DASHBOARD_PATH, include_in_schema=False)(gateway.dashboard_page)
    figures = operation(Dashboard, "What has been going on.", operation_id="getDashboard")
    get("/v1/dashboard", openapi_extra=figures)(_with_principal(gateway.dashboard.dashboard))

    _add_tenant_routes(app, gateway)
    _add_experiment_routes(app, gateway)

    document = OpenApiEndpoint(
        app,
        gateway.limits,
        models=_OTHER_MODELS,
        has_tiers_elsewhere=bool(gateway.context.cloud.tiers),
    )
    get("/openapi.json", include_in_schema=False)(document.answer)


def _add_tenant_routes(app: FastAPI, gateway: Gateway) -> None:
    """What tenants may ask of themselves, and administrators of them."""
    tenancy = gateway.context.tenancy
    usage = UsageApi(tenancy.database)
    admin = AdminApi(tenancy.keys, gateway.read_small_body)
    app.get("/v1/usage", openapi_extra=USAGE_OPERATION)(_with_principal(usage.usage))
    for route in ADMIN_ROUTES:
        app.add_api_route(
            route.path,
            _with_principal(getattr(admin, route.handler)),
            methods=[route.method],
            openapi_extra=route.operation,
        )


def _add_experiment_routes(app: FastAPI, gateway: Gateway) -> None:
    """What administrators ask of experiments, and what is said of answers."""
    context = gateway.context
    authenticator = context.tenancy.keys.authenticator
    check = arm_check(gateway.planner, context.clock)
    api = ExperimentApi(authenticator, context.experiments, gateway.read_small_body, check)
    feedback = FeedbackApi(context.experiments.feedback)

    async def give_feedback(request: Request) -> Response:
        return await gateway.counted(request, feedback.give, limit_bytes=MAX_SMALL_BODY_BYTES)

    app.post("/v1/feedback", openapi_extra=FEEDBACK_OPERATION)(give_feedback)
    for route in EXPERIMENT_ROUTES:
        app.add_api_route(
            route.path,
            _with_principal(getattr(api, route.handler)),
            methods=[route.method],
            openapi_extra=route.operation,
        )


def _with_principal(
    handler: Callable[[Request, Principal], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, principal_of(request))

    return endpoint
