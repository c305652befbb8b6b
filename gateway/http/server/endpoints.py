"""Takes requests in and answers them: the intake, and the endpoints that need it."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.answering.caching.answers import AnswerCache
from outrider.gateway.answering.candidates.planner import Planner
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.parsed_request import RequestContext
from outrider.gateway.contract.answers.outcomes import OutcomeSink
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import naming, yield_if_long
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.http.apis.api import Api, Caller, Reserve
from outrider.gateway.http.apis.infill.api import InfillApi
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.http.apis.ollama.api import OllamaChat, OllamaGenerate
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.tokenize import Tokenizing
from outrider.gateway.http.apis.verify.api import VerifyApi
from outrider.gateway.http.edge.bodies import (
    BodyBudget,
    read_form_body,
    read_json_body,
)
from outrider.gateway.http.edge.idempotency import HEADER as IDEMPOTENCY_KEY
from outrider.gateway.http.edge.idempotency import IdempotentAnswers
from outrider.gateway.http.server.answer_response import AnswerResponse, ClientFormat, WorkResponse
from outrider.gateway.http.server.auth_dispatcher import model_in_path, principal_of, request_id_of
from outrider.gateway.http.server.request_trace import RequestTrace, TracedRequest
from outrider.gateway.http.server.veil import veil_of
from outrider.gateway.telemetry.capture import NULL_CAPTURE, Capture
from outrider.gateway.telemetry.log_context import log_context
from outrider.gateway.telemetry.spans import record_http
from outrider.gateway.telemetry.tracer import NULL_SPAN, NULL_TRACER, Tracer
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.gateway.tenancy.metering.meter import MeteredEnding, RequestMeter
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.upstream.call import HOPS_HEADER

if TYPE_CHECKING:
    from outrider.gateway.checks.checks import Checks

MAX_SMALL_BODY_BYTES: Final = 2**20
"""The bound on a body that holds no prompt."""
Result = TypeVar("Result")
_HOP: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIntake:
    """Counts requests, reads their bodies, and opens their accounts and traces."""

    tenancy: Tenancy
    limits: GatewayLimits
    bodies: BodyBudget
    sinks: Sequence[OutcomeSink]
    """Receive the outcome of each request."""
    tracer: Tracer
    capture: Capture
    clock: Callable[[], float]
    """Monotonic."""
    wall_clock: Callable[[], float]
    """Seconds since 1970."""

    def meter(
        self, request: Request, endpoint: str, sinks: Sequence[OutcomeSink] = ()
    ) -> RequestMeter:
        """Open the account of a request that arrives now."""
        return RequestMeter(
            tenancy=self.tenancy,
            principal=principal_of(request),
            endpoint=endpoint,
            client_request_id=request_id_of(request),
            arrival_s=self.clock(),
            clock=self.clock,
            wall_clock=self.wall_clock,
            sinks=sinks,
        )

    def trace(self, request: Request, meter: RequestMeter, body: bytes) -> RequestTrace | None:
        """Begin to follow a request for operators; its trace begins or goes on here.

        None where neither traces nor texts are recorded.
        """
        if self.tracer is NULL_TRACER and self.capture is NULL_CAPTURE:
            return None
        scope, headers = request.scope, request.headers
        # The dispatcher has put the endpoint's path in the place of the client's own.
        method, route = scope["method"], scope["path"]
        span = self.tracer.begin(f"{method} {route}", headers=headers, start_s=meter.arrival_s)
        record_http(
            span,
            method=method,
            route=route,
            path=scope.get("raw_path", b"").decode("latin-1") or route,
            scheme=scope["scheme"],
            host=headers.get("host", ""),
        )
        if span.trace_id and (logged := log_context()) is not None:
            logged.trace_id = span.trace_id
        traced = TracedRequest(
            request_id=request_id_of(request),
            key_id=meter.principal.key_id,
            endpoint=meter.endpoint,
            body=body,
        )
        return RequestTrace(traced, span, self.capture, self.clock, self.wall_clock, meter)

    async def with_body(
        self,
        request: Request,
        meter: RequestMeter,
        work: Callable[[bytes, Reserve], Awaitable[Result]],
        limit_bytes: int | None = None,
        *,
        is_form: bool = False,
    ) -> Result:
        """Read the body of a request that is counted, and hold both until `work` on it is done.

        `work` may reserve more bytes than the body's, for what belongs to it.
        `is_form`: it is in parts; else JSON.

        A request that ends without an answer of its own (a repeated one) gives its count back. So
        does one that fails through no fault of its own.
        """
        try:
            with self.bodies.hold(_owner_of(request)) as held:
                most = limit_bytes or self.limits.max_body_bytes
                bounds = self.limits.json_bounds
                if is_form:
                    body = await read_form_body(request, limit_bytes=most, held=held)
                else:
                    body = await read_json_body(request, limit_bytes=most, held=held, bounds=bounds)
                    if (model := model_in_path(request)) is not None:
                        body = naming(body, model)
                result = await work(body, held.reserve)
            await meter.end_unless_ended()
        except Exception as error:
            meter.note_error(error)
            await meter.end_and_wait("failed")
            raise
        finally:
            meter.end_in_background("failed")
        return result

    async def counted(
        self,
        request: Request,
        work: Callable[[bytes, Caller], Awaitable[Response]],
        *,
        limit_bytes: int | None = None,
    ) -> Response:
        """Do work that writes no answer; it counts as a request in the limits all the same.

        `limit_bytes`: of its body, where the limit is not the settings'.
        """
        meter = self.meter(request, request.scope["path"])
        await meter.enter()

        async def answered(body: bytes, reserve: Reserve) -> Response:
            caller = Caller(principal=meter.principal, reserve=reserve)
            response = await work(body, caller)
            response.headers.update(meter.headers)
            await meter.end_and_wait("answered")
            return response

        return await self.with_body(request, meter, answered, limit_bytes)

    async def counted_unread(
        self, request: Request, work: Callable[[Request, Principal], Awaitable[Response]]
    ) -> Response:
        """Do work that reads its body itself, as it comes. It counts as a request as well."""
        meter = self.meter(request, request.scope["path"])
        await meter.enter()
        ending: MeteredEnding = "failed"
        try:
            response = await work(request, meter.principal)
            ending = "answered"
        except Exception as error:
            meter.note_error(error)
            raise
        finally:
            await meter.end_and_wait(ending)
        response.headers.update(meter.headers)
        return response

    async def read_small_body(self, request: Request) -> bytes:
        """Read the body of an administrator's request. Raises GatewayError."""
        with self.bodies.hold(_owner_of(request)) as held:
            return await read_json_body(
                request,
                limit_bytes=MAX_SMALL_BODY_BYTES,
                held=held,
                bounds=self.limits.json_bounds,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEndpoints:
    """Answers requests in the format of each API."""

    intake: RequestIntake
    planner: Planner
    tokenizing: Tokenizing
    idempotent: IdempotentAnswers
    cache: AnswerCache
    responses_api: ResponsesApi
    messages_api: MessagesApi
    ollama_api: OllamaChat
    ollama_generate_api: OllamaGenerate
    infill_api: InfillApi
    verify_api: VerifyApi
    clock: Callable[[], float]
    checks: "Checks | None" = None
    """None where no check is configured."""

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer("chat", request)

    async def completions(self, request: Request) -> Response:
        """Continue text or token ids, without a chat template."""
        return await self._answer("completion", request)

    async def responses(self, request: Request) -> Response:
        """Answer in the format of OpenAI's Responses API."""
        return await self._answer("chat", request, self.responses_api)

    async def messages(self, request: Request) -> Response:
        """Answer in the format of Anthropic's Messages API."""
        return await self._answer("chat", request, self.messages_api)

    async def ollama_chat(self, request: Request) -> Response:
        """Answer a conversation in the format of Ollama's API."""
        return await self._answer("chat", request, self.ollama_api)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer a prompt in the format of Ollama's API."""
        return await self._answer("chat", request, self.ollama_generate_api)

    async def infill(self, request: Request) -> Response:
        """Fill in text in the format of llama.cpp's server."""
        return await self._answer("completion", request, self.infill_api)

    async def verify(self, request: Request) -> Response:
        """Say how an answer agrees with its receipt."""
        return await self._answer("completion", request, self.verify_api)

    async def _answer(
        self, endpoint: Endpoint, request: Request, api: Api | None = None
    ) -> Response:
        name = endpoint if api is None else api.name
        meter = self.intake.meter(request, name, self.intake.sinks)

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            await self._count(request, meter)
            await self.intake.with_body(request, meter, partial(answer, scope, receive, send))

        async def answer(
            scope: Scope, receive: Receive, send: Send, body: bytes, reserve: Reserve
        ) -> None:
            make = partial(self._response, endpoint, request, body, api, meter, reserve)
            if IDEMPOTENCY_KEY in request.headers:
                principal = meter.principal
                response = await self.idempotent.answer(
                    request, body, make, owner=principal.owner, tenant=principal.tenant
                )
            else:
                response = await make()
            await response(scope, receive, send)

        return WorkResponse(work)

    async def _count(self, request: Request, meter: RequestMeter) -> None:
        """Count the request in its limits. One that they refuse has an outcome too."""
        try:
            await meter.enter()
        except GatewayError as error:
            trace = self.intake.trace(request, meter, b"")
            (meter if trace is None else trace).note_outcome(None, "failed", None, error)
            raise

    async def _response(
        self,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        api: Api | None,
        meter: RequestMeter,
        reserve: Reserve,
    ) -> Response:
        """Plan a request that is counted and read; return what sends its answer, kept or new."""
        trace = self.intake.trace(request, meter, body)
        observer = meter if trace is None else trace
        if trace is not None:
            meter.span = trace.span
        try:
            translated, check = None, None
            if self.checks is not None:
                name = endpoint if api is None else api.name
                request_id = request_id_of(request)
                check = await self.checks.of_request(body, meter.principal, request_id, name)
                body = body if check is None else await check.request()
            if api is not None:
                caller = Caller(principal=meter.principal, reserve=reserve)
                translated = await api.read(body, caller)
            await yield_if_long(body)
            context = request_context(request, meter.arrival_s, meter)
            if translated is not None:
                body, endpoint = translated.chat_body, translated.endpoint
                context = msgspec.structs.replace(
                    context,
                    ignored_fields=translated.ignored,
                    begins_with_usage=translated.begins_with_usage,
                )
                if translated.ready is not None:
                    await self.planner.route_report(endpoint, body, context)
                    return await _looked_up(translated.ready, meter, trace)
            if check is not None:  # a trace would tell what they have not seen
                with_trace = context.with_trace and not check.names
                context = msgspec.structs.replace(context, check=check, with_trace=with_trace)
            veil = veil_of(self.planner.chains, body, meter.principal)
            planned = await self.planner.plan(endpoint, body, context)
            answering = self.cache.serve(planned)
        except BaseException as error:
            observer.note_outcome(None, "failed", None, error)
            raise
        if translated is not None and translated.storage is not None and answering.is_private:
            translated.storage.forbid()  # an alias has made it private
        meter.is_streamed = answering.is_streamed
        if trace is not None:
            trace.planned(is_private=answering.is_private, is_streamed=answering.is_streamed)
        recording = None if trace is None else trace.recording
        return AnswerResponse(
            answering,
            clock=self.clock,
            meter=meter,
            format_=ClientFormat(veil, translated),
            on_part=() if recording is None else (recording.add,),
            on_end=(observer.note_outcome,),
        )

    async def route(self, request: Request) -> Response:
        """Report where a request would go, without answering it."""

        async def report(body: bytes, caller: Caller) -> Response:
            context = request_context(request, self.clock())
            endpoint = _endpoint_of(body)
            await yield_if_long(body)
            found = await self.planner.route_report(endpoint, body, context)
            veil = veil_of(self.planner.chains, body, caller.principal)
            return json_response(found if veil is None else veil.route(msgspec.to_builtins(found)))

        return await self.intake.counted(request, report)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        return await self.intake.counted(request, self.tokenizing.tokenize)

    async def tokenizer_info(self, request: Request) -> Response:
        """Return the control tokens of a model's tokenizer."""
        model = request.query_params.get("model")
        return await self.tokenizing.describe(model, principal_of(request))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        return await self.intake.counted(request, self.tokenizing.detokenize)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request in the format of the Messages API."""
        return await self.intake.counted(request, self.tokenizing.count_tokens)

    async def count_input(self, request: Request) -> Response:
        """Count the tokens of a request in the format of the Responses API."""
        return await self.intake.counted(request, self.tokenizing.count_input)


async def _looked_up(answer: bytes, meter: RequestMeter, trace: RequestTrace | None) -> Response:
    """Answer a request that only asked whether its model is there; it counts in the limits."""
    await meter.end_and_wait("answered")
    if trace is not None:
        trace.span.end()
    return Response(answer, media_type="application/json", headers=meter.headers)


def _owner_of(request: Request) -> str:
    """Name the owner of a body's bytes: the key, or the address where there is no key."""
    principal = principal_of(request)
    if principal.key_id != ANONYMOUS.key_id:
        return principal.key_id
    return f"address {request.client.host if request.client else '-'}"


def request_context(
    request: Request, arrival_s: float, meter: RequestMeter | None = None
) -> RequestContext:
    """Build the context of a body."""
    headers = request.headers
    passed = headers.getlist(HOPS_HEADER)
    # A malformed gateway id is not passed on: the header goes to upstream servers.
    parts = ",".join(passed).split(",") if passed else ()
    hops = tuple(hop for part in parts if _HOP.fullmatch(hop := part.strip()))
    return RequestContext(
        arrival_s=arrival_s,
        request_id=request_id_of(request),
        hops=hops,
        with_trace=headers.get("x-outrider-trace") == "1",
        principal=principal_of(request),
        meter=meter,
        headers=headers,
        span=NULL_SPAN if meter is None else meter.span,
    )


def _endpoint_of(body: bytes) -> Endpoint:
    """Return the endpoint that a body is for; what fits neither is refused as a chat."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    is_completion = isinstance(document, dict) and "prompt" in document
    return "completion" if is_completion and "messages" not in document else "chat"
