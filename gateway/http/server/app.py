"""The HTTP application: the paths of its endpoints and their descriptions."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.pass_through import PASSED_ROUTES
from outrider.gateway.contract.errors.http import ProblemBodies, handle_exception
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.model_cards import (
    ModelCard,
    ModelList,
    NamedModel,
    NamedModels,
)
from outrider.gateway.contract.schema.openapi import (
    generation_operation,
    models_operation,
    operation,
    passed_operation,
    question_operation,
)
from outrider.gateway.contract.schema.receipts import PublishedKeys
from outrider.gateway.contract.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    Readiness,
    ServerLoad,
    Version,
)
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.engines.adapters.admin import AdapterApi
from outrider.gateway.engines.fleet.admin import ReplicaApi
from outrider.gateway.experiments.admin import ExperimentApi
from outrider.gateway.experiments.feedback import FeedbackApi
from outrider.gateway.experiments.feedback_schema import FEEDBACK_MODELS, FEEDBACK_OPERATION
from outrider.gateway.http.apis.api import Caller
from outrider.gateway.http.apis.audit import AuditApi
from outrider.gateway.http.apis.batches.objects import BATCH_MODELS
from outrider.gateway.http.apis.infill.answers import INFILL_MODELS
from outrider.gateway.http.apis.infill.openapi import infill_operation
from outrider.gateway.http.apis.messages.answers import MESSAGES_MODELS
from outrider.gateway.http.apis.messages.openapi import count_tokens_operation, messages_operation
from outrider.gateway.http.apis.named_prompts import PromptApi
from outrider.gateway.http.apis.ollama.answers import OLLAMA_MODELS
from outrider.gateway.http.apis.ollama.api import problem_body
from outrider.gateway.http.apis.ollama.embedding import OLLAMA_EMBEDDING_MODELS, OllamaEmbed
from outrider.gateway.http.apis.ollama.endpoints import OllamaEndpoints
from outrider.gateway.http.apis.ollama.openapi import (
    chat_operation,
    embed_operation,
    generate_operation,
    ps_operation,
    show_operation,
    tags_operation,
    version_operation,
)
from outrider.gateway.http.apis.on_demand import OnDemandApi
from outrider.gateway.http.apis.responses.answers import RESPONSES_MODELS
from outrider.gateway.http.apis.responses.endpoints import StoredEndpoints
from outrider.gateway.http.apis.responses.openapi import (
    count_input_operation,
    delete_operation,
    input_items_operation,
    responses_operation,
    retrieve_operation,
)
from outrider.gateway.http.apis.tiers import TierApi
from outrider.gateway.http.apis.tokenize_api import (
    detokenize_operation,
    tokenize_operation,
    tokenizer_info_operation,
)
from outrider.gateway.http.apis.tokenize_schema import TOKENIZE_MODELS
from outrider.gateway.http.apis.verify.openapi import keys_operation, verify_operation
from outrider.gateway.http.apis.verify.schema import VERIFY_MODELS
from outrider.gateway.http.dashboard.api import DashboardApi
from outrider.gateway.http.dashboard.schema import DASHBOARD_MODELS, Dashboard
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.http.server.auth_dispatcher import (
    FREE_PATHS,
    RECEIPT_KEYS_PATH,
    AuthDispatcher,
    Authenticate,
    principal_of,
)
from outrider.gateway.http.server.batch_routes import BatchRoutes
from outrider.gateway.http.server.endpoints import (
    MAX_SMALL_BODY_BYTES,
    AnswerEndpoints,
    RequestIntake,
)
from outrider.gateway.http.server.lifespan import Lifespan
from outrider.gateway.http.server.openapi_document import OpenApiEndpoint
from outrider.gateway.http.server.pages import ADMIN_PATH, DASHBOARD_PATH, PLAYGROUND_PATHS, Pages
from outrider.gateway.http.server.pass_through_endpoints import PassThroughEndpoints
from outrider.gateway.http.server.status import StatusEndpoints
from outrider.gateway.http.sign_in.code_flow import CALLBACK_PATH
from outrider.gateway.http.sign_in.endpoints import (
    AUTH_PATHS,
    LOGIN_PATH,
    LOGOUT_PATH,
    SESSION_PATH,
    SignInEndpoints,
)
from outrider.gateway.settings.extras import own_version
from outrider.gateway.tenancy.keys.admin import AdminApi
from outrider.gateway.tenancy.keys.admin_handlers import AdminHandlers
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.usage_api import USAGE_MODELS, USAGE_OPERATION, UsageApi

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"
_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
_COUNT_INPUT: Final = "/v1/responses/input_tokens"
_TOKENIZE: Final = "/v1/tokenize"
_TOKENIZER_INFO: Final = "/v1/tokenizer_info"
_DETOKENIZE: Final = "/v1/detokenize"
_OLLAMA: Final = "/api/"
_OLLAMA_CHAT: Final = "/api/chat"
_OLLAMA_GENERATE: Final = "/api/generate"
_INFILL: Final = "/infill"
_VERIFY: Final = "/v1/verify"
_METRICS: Final = "/metrics"
_ADMIN: Final = (
    *(AdminApi, AdapterApi, ReplicaApi, TierApi, OnDemandApi),
    *(PromptApi, AuditApi, ExperimentApi),
)
_OTHER_MODELS: Final = (
    *RESPONSES_MODELS,
    *MESSAGES_MODELS,
    *OLLAMA_MODELS,
    *INFILL_MODELS,
    *OLLAMA_EMBEDDING_MODELS,
    *TOKENIZE_MODELS,
    *BATCH_MODELS,
    *VERIFY_MODELS,
    PublishedKeys,
    *USAGE_MODELS,
    *DASHBOARD_MODELS,
    *FEEDBACK_MODELS,
    *(model for handlers in _ADMIN for route in handlers.routes() for model in route.models),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The endpoints of one gateway by subject."""

    answers: AnswerEndpoints
    status: StatusEndpoints
    pages: Pages
    dashboard: DashboardApi
    ollama: OllamaEndpoints
    usage: UsageApi
    admin: AdminApi
    adapters: AdapterApi
    replicas: ReplicaApi
    tiers: TierApi
    on_demand: OnDemandApi
    prompts: PromptApi
    audit: AuditApi
    experiments: ExperimentApi
    feedback: FeedbackApi
    intake: RequestIntake
    lifespan: Lifespan
    authenticate: Authenticate
    foreign_pages: ForeignPages
    has_open_metrics: bool
    """/metrics requires no key."""
    upstream_tiers: tuple[str, ...]
    passing: PassThroughEndpoints
    stored: StoredEndpoints
    batches: BatchRoutes
    sign_in: SignInEndpoints


def create_app(routes: Routes) -> AuthDispatcher:
    """Build the application. Its engine need not be started: the app's lifespan does that."""
    app = FastAPI(
        title="Outrider",
        version=own_version(),
        description="The OpenAI API over a small and a large model that work together.",
        lifespan=routes.lifespan.run,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be made from the client's own host header
    )
    _add_routes(app, routes)
    answers = routes.answers
    responses_problem = answers.responses_api.problem_body
    messages_problem = answers.messages_api.problem_body
    problem_bodies = ProblemBodies(
        {
            _RESPONSES: responses_problem,
            _COUNT_INPUT: responses_problem,
            _MESSAGES: messages_problem,
            _COUNT_TOKENS: messages_problem,
            _OLLAMA: problem_body,
            _INFILL: answers.infill_api.problem_body,
        }
    )
    for kind in (GatewayError, EngineError, HTTPException):
        app.add_exception_handler(kind, partial(handle_exception, bodies=problem_bodies))
    dispatcher = AuthDispatcher(
        app,
        {
            _CHAT: answers.chat,
            _COMPLETIONS: answers.completions,
            _RESPONSES: answers.responses,
            _MESSAGES: answers.messages,
            _COUNT_TOKENS: answers.count_tokens,
            _COUNT_INPUT: answers.count_input,
            _OLLAMA_CHAT: answers.ollama_chat,
            _OLLAMA_GENERATE: answers.ollama_generate,
            _INFILL: answers.infill,
            _VERIFY: answers.verify,
        },
        authenticate=routes.authenticate,
        foreign_pages=routes.foreign_pages,
        problem_bodies=problem_bodies,
        sign_in=routes.pages.sign_in,
        free_paths=FREE_PATHS | AUTH_PATHS | ({_METRICS} if routes.has_open_metrics else set()),
    )
    dispatcher.sessions = routes.sign_in.sessions
    return dispatcher


def _add_routes(app: FastAPI, routes: Routes) -> None:
    chat = generation_operation(ChatRequest, ChatCompletion, ChatCompletionChunk, "createChat")
    completion = generation_operation(CompletionRequest, Completion, Completion, "createCompletion")
    route = question_operation(
        (ChatRequest, CompletionRequest), RouteReport, "Where it would go.", "route"
    )
    answers = routes.answers
    app.post(_CHAT, openapi_extra=chat)(answers.chat)
    app.post(_COMPLETIONS, openapi_extra=completion)(answers.completions)
    app.post(_RESPONSES, openapi_extra=responses_operation())(answers.responses)
    app.post(_MESSAGES, openapi_extra=messages_operation())(answers.messages)
    app.post(_COUNT_TOKENS, openapi_extra=count_tokens_operation())(answers.count_tokens)
    app.post(_COUNT_INPUT, openapi_extra=count_input_operation())(answers.count_input)
    app.post(_TOKENIZE, openapi_extra=tokenize_operation())(answers.tokenize)
    app.get(_TOKENIZER_INFO, openapi_extra=tokenizer_info_operation())(answers.tokenizer_info)
    app.post(_DETOKENIZE, openapi_extra=detokenize_operation())(answers.detokenize)
    app.post(_OLLAMA_CHAT, openapi_extra=chat_operation())(answers.ollama_chat)
    app.post(_OLLAMA_GENERATE, openapi_extra=generate_operation())(answers.ollama_generate)
    app.post(_INFILL, openapi_extra=infill_operation())(answers.infill)
    app.post(_VERIFY, openapi_extra=verify_operation())(answers.verify)
    for passed in PASSED_ROUTES:
        described = passed_operation(passed.path, takes_form=passed.takes_form)
        endpoint = routes.passing.endpoint(passed)
        is_described = routes.passing.passing.is_available(passed)
        app.post(f"/v1{passed.path}", openapi_extra=described, include_in_schema=is_described)(
            endpoint
        )
    app.post("/v1/route", openapi_extra=route)(answers.route)
    _add_stored_routes(app, routes.stored)
    routes.batches.add_to(app, routes.intake)
    _add_ollama_routes(app, routes)
    _add_status_routes(app, routes)
    _add_tenant_routes(app, routes)
    _add_experiment_routes(app, routes)

    document = OpenApiEndpoint(
        app,
        routes.status.limits,
        models=_OTHER_MODELS,
        upstream_tiers=routes.upstream_tiers,
    )
    app.get("/openapi.json", include_in_schema=False)(document.answer)


def _add_stored_routes(app: FastAPI, stored: StoredEndpoints) -> None:
    """Add stored responses; where nothing is stored, the paths say so and are not described."""
    one = f"{_RESPONSES}/{{response_id}}"
    for method, path, handler, described in (
        ("GET", one, stored.retrieve, retrieve_operation()),
        ("DELETE", one, stored.delete, delete_operation()),
        ("GET", f"{one}/input_items", stored.input_items, input_items_operation()),
    ):
        app.add_api_route(
            path,
            _with_principal(handler),
            methods=[method],
            openapi_extra=described,
            include_in_schema=stored.conversations is not None,
        )


def _add_status_routes(app: FastAPI, routes: Routes) -> None:
    """Add what there is and how it goes: models, health, metrics, pages, figures."""
    get, status, pages = app.get, routes.status, routes.pages
    get(
        "/v1/models",
        openapi_extra=models_operation(ModelList, NamedModels, "All names.", "listModels"),
    )(status.models)
    get(
        "/v1/models/{model_id:path}",
        openapi_extra=models_operation(ModelCard, NamedModel, "One name.", "getModel", 404),
    )(status.model)
    get("/health", openapi_extra=operation(Health, "Alive.", operation_id="health"))(status.health)
    get(
        "/ready",
        openapi_extra=operation(Readiness, "Ready.", 503, operation_id="ready"),
    )(status.ready)
    ping = operation(Readiness, "Ready, in SageMaker's words.", 503, operation_id="ping")
    get("/ping", openapi_extra=ping)(status.ready)
    app.post("/ping", openapi_extra={**ping, "operationId": "postPing"})(status.ready)
    version = operation(Version, "The gateway's release.", operation_id="version")
    get("/version", openapi_extra=version)(status.version)
    get(RECEIPT_KEYS_PATH, openapi_extra=keys_operation())(status.receipt_keys)
    load = operation(ServerLoad, "Requests under way.", operation_id="load")
    get("/load", openapi_extra=load)(status.load)
    get(_METRICS, include_in_schema=False)(status.expose_metrics)
    for path in PLAYGROUND_PATHS:
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(pages.playground)
    get(DASHBOARD_PATH, include_in_schema=False)(pages.dashboard)
    get(ADMIN_PATH, include_in_schema=False)(pages.admin)
    get(LOGIN_PATH, include_in_schema=False)(routes.sign_in.login)
    get(CALLBACK_PATH, include_in_schema=False)(routes.sign_in.callback)
    get(SESSION_PATH, include_in_schema=False)(routes.sign_in.session)
    app.post(LOGOUT_PATH, include_in_schema=False)(routes.sign_in.logout)
    figures = operation(Dashboard, "Figures of the dashboard.", operation_id="getDashboard")
    get("/v1/dashboard", openapi_extra=figures)(_with_principal(routes.dashboard.dashboard))


def _add_ollama_routes(app: FastAPI, routes: Routes) -> None:
    """Add what Ollama's API says of models, and its embeddings, which upstream tiers make."""
    ollama, passing = routes.ollama, routes.passing
    embeddings = next(each for each in PASSED_ROUTES if each.endpoint == "embeddings")
    for path, is_old in (("/api/embed", False), ("/api/embeddings", True)):
        translate = OllamaEmbed(parts=routes.answers.ollama_api.parts, is_old=is_old).request
        app.post(
            path,
            openapi_extra=embed_operation(is_old=is_old),
            include_in_schema=passing.passing.is_available(embeddings),
        )(passing.endpoint(embeddings, translate))
    app.get("/api/tags", openapi_extra=tags_operation())(_with_principal(ollama.tags))
    app.get("/api/ps", openapi_extra=ps_operation())(_with_principal(ollama.ps))
    app.post("/api/show", openapi_extra=show_operation())(_with_principal(ollama.show))
    app.get("/api/version", openapi_extra=version_operation())(_with_principal(ollama.version))


def _add_tenant_routes(app: FastAPI, routes: Routes) -> None:
    """Add the endpoints for tenants about themselves, and for administrators about tenants."""
    app.get("/v1/usage", openapi_extra=USAGE_OPERATION)(_with_principal(routes.usage.usage))
    for handlers in (
        *(routes.admin, routes.adapters, routes.replicas),
        *(routes.tiers, routes.on_demand, routes.prompts, routes.audit),
    ):
        _add_handlers(app, handlers)


def _add_experiment_routes(app: FastAPI, routes: Routes) -> None:
    """Add the administrators' endpoints for experiments, and the feedback on answers."""

    async def give_feedback(request: Request) -> Response:
        async def give(body: bytes, caller: Caller) -> Response:
            return await routes.feedback.give(body, caller.principal)

        return await routes.intake.counted(request, give, limit_bytes=MAX_SMALL_BODY_BYTES)

    app.post("/v1/feedback", openapi_extra=FEEDBACK_OPERATION)(give_feedback)
    _add_handlers(app, routes.experiments)


def _add_handlers(app: FastAPI, handlers: AdminHandlers) -> None:
    for route in handlers.routes():
        app.add_api_route(
            route.path,
            _with_principal(handlers.endpoint(route)),
            methods=[route.method],
            openapi_extra=route.operation,
        )


def _with_principal(
    handler: Callable[[Request, Principal], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, principal_of(request))

    return endpoint
