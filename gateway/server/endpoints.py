"""The endpoints that generate, report a request's route, or count its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.apis.api import Api
from gateway.apis.messages.api import MessagesApi
from gateway.apis.responses.api import ResponsesApi
from gateway.apis.tokenize import Tokenizing
from gateway.edge.bodies import end_turn
from gateway.edge.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.edge.idempotency import IdempotentAnswers
from gateway.handoff.planner import Planner
from gateway.metering.meter import RequestMeter
from gateway.metering.outcome_record import OutcomeRecord
from gateway.schema.kinds import Endpoint
from gateway.server.auth_dispatcher import principal_of
from gateway.server.intake import RequestIntake, request_context
from gateway.server.json_response import json_response
from gateway.server.responses import AnswerResponse, WorkResponse
from gateway.telemetry.tracer import NULL_SPAN
from gateway.tenants.principal import Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEndpoints:
    """Answers requests in the format of each API."""

    intake: RequestIntake
    planner: Planner
    tokenizing: Tokenizing
    idempotent: IdempotentAnswers
    responses_api: ResponsesApi
    messages_api: MessagesApi
    clock: Callable[[], float]

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

    async def _answer(
        self, endpoint: Endpoint, request: Request, surface: Api | None = None
    ) -> Response:
        arrival_s = self.clock()
        record = self.intake.record(arrival_s)
        meter = self.intake.meter(request, surface.name if surface else endpoint, arrival_s, record)
        record.identify(meter.account)
        principal = principal_of(request)

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            async with self.intake.entered(request, meter, record) as body:
                make = partial(self._planned, endpoint, request, body, surface, meter, record)
                if IDEMPOTENCY_KEY in request.headers:
                    response = await self.idempotent.answer(
                        request, body, make, owner=principal.key_id, tenant=principal.tenant
                    )
                else:
                    response = await make()
                await response(scope, receive, send)

        return WorkResponse(work)

    async def _planned(
        self,
        endpoint: Endpoint,
        request: Request,
        body: bytes,
        surface: Api | None,
        meter: RequestMeter,
        record: OutcomeRecord,
    ) -> Response:
        """Answer a request that is counted and read."""
        watch = self.intake.watch(request, meter.account, body, record)
        outcome = record if watch is None else watch
        span = meter.span = NULL_SPAN if watch is None else watch.span
        try:
            translated = None if surface is None else await surface.read(body)
            await end_turn(body)
            plan = await self.planner.plan(
                endpoint,
                body if translated is None else translated.chat_body,
                request_context(request, meter.account.arrival_s, meter, span, record),
            )
        except BaseException as error:
            outcome.ended(None, "failed", None, error)
            raise
        meter.is_streamed = record.is_streamed = plan.is_streamed
        if watch is not None:
            watch.planned(is_private=plan.is_private, is_streamed=plan.is_streamed)
        return AnswerResponse(
            plan.answering,
            is_streamed=plan.is_streamed,
            clock=self.clock,
            meter=meter,
            writer=None if translated is None else translated.writer,
            outcome=outcome,
            recording=None if watch is None else watch.recording,
        )

    async def route(self, request: Request) -> Response:
        """Report where a request would go, without answering it."""

        async def report(body: bytes, principal: Principal) -> Response:
            del principal
            context = request_context(request, self.clock())
            endpoint = _endpoint_of(body)
            await end_turn(body)
            told = await self.planner.route_report(endpoint, body, context)
            return json_response(told)

        return await self.intake.counted(request, report)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        return await self.intake.counted(request, self.tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        return await self.intake.counted(request, self.tokenizing.detokenize)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request in the format of the Messages API."""
        return await self.intake.counted(request, self.tokenizing.count_tokens)


def _endpoint_of(body: bytes) -> Endpoint:
    """Return the endpoint that a body is for; what fits neither is refused as a chat."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    is_completion = isinstance(document, dict) and "prompt" in document
    return "completion" if is_completion and "messages" not in document else "chat"
