"""Endpoints whose requests are passed on to upstream tiers as they came."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.answering.candidates.pass_through import (
    PassedAnswer,
    PassedRoute,
    PassThrough,
)
from outrider.gateway.contract.errors.tree import AuthenticationError
from outrider.gateway.http.apis.api import Reserve
from outrider.gateway.http.edge.departure import until_departure
from outrider.gateway.http.server.answer_response import WorkResponse
from outrider.gateway.http.server.auth_dispatcher import model_in_path, request_id_of
from outrider.gateway.http.server.endpoints import RequestIntake, request_context
from outrider.gateway.http.server.veil import veil_for
from outrider.gateway.tenancy.metering.meter import RequestMeter

if TYPE_CHECKING:
    from outrider.gateway.checks.checks import Checks

Translate = Callable[[bytes], Awaitable[tuple[bytes, Callable[[bytes], bytes]]]]
"""Translates another API's request; returns it, and what translates its answer back."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassThroughEndpoints:
    """Counts and bounds requests as every answer's, and ends their work when the client leaves."""

    intake: RequestIntake
    passing: PassThrough
    checks: "Checks | None" = None
    """None where no check is configured."""

    def endpoint(
        self, route: PassedRoute, translate: Translate | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of one path. `translate`: from another API's words, and back."""

        async def answer(request: Request) -> Response:
            return self._answer(route, request, translate)

        answer.__name__ = route.path.strip("/").replace("/", "_")
        return answer

    def _answer(
        self, route: PassedRoute, request: Request, translate: Translate | None
    ) -> Response:
        meter = self.intake.meter(request, route.path.strip("/"))

        async def work(scope: Scope, receive: Receive, send: Send) -> None:
            await meter.enter()
            work = partial(answer, scope, receive, send)
            await self.intake.with_body(request, meter, work, is_form=route.takes_form)

        async def answer(
            scope: Scope, receive: Receive, send: Send, body: bytes, _: Reserve
        ) -> None:
            context = request_context(request, meter.arrival_s, meter)
            responses: list[Response] = []

            async def passed() -> None:
                checked = body
                if self.checks is not None and not route.takes_form:
                    checked = await self._checked(self.checks, route, request, body, meter)
                content_type = request.headers.get("content-type", "")
                model = model_in_path(request)
                asked, answered = checked, None
                if translate is not None:
                    asked, answered = await translate(checked)
                found = await self.passing.answer(route, content_type, asked, context, model)
                responses.append(self._response(found, meter, answered))

            try:
                await self._while_key_lasts(meter, until_departure(scope, receive, passed()))
            except ClientDisconnect:
                meter.end_in_background("cancelled")
                logger.info("client left request_id=%s", request_id_of(request))
                return
            await meter.end_and_wait("answered")
            (response,) = responses
            response.headers.update(meter.headers)
            await response(scope, receive, send)

        return WorkResponse(work)

    @staticmethod
    async def _checked(
        checks: "Checks", route: PassedRoute, request: Request, body: bytes, meter: RequestMeter
    ) -> bytes:
        """Return the request as it may go on. Raises BadRequestError where it may not."""
        name = route.path.strip("/")
        check = await checks.of_request(body, meter.principal, request_id_of(request), name)
        return body if check is None else await check.request()

    def _response(
        self,
        found: PassedAnswer,
        meter: RequestMeter,
        answered: Callable[[bytes], bytes] | None,
    ) -> Response:
        """Return a server's answer without what the key and the alias do not reveal."""
        body, headers = found.body, {"x-outrider-tier": found.tier}
        veil = veil_for(self.passing.chains, found.model, meter.principal)
        if veil is not None:
            body, headers = veil.passed_body(body), veil.headers(headers)
        if answered is not None:
            body = answered(body)
        return Response(body, media_type=found.content_type, headers=headers)

    @staticmethod
    async def _while_key_lasts(meter: RequestMeter, work: Coroutine[Any, Any, None]) -> None:
        """Do the work. Raises AuthenticationError once the request's key is revoked or expires."""
        errors: list[AuthenticationError] = []
        task = asyncio.ensure_future(work)

        def end(error: AuthenticationError) -> None:
            errors.append(error)
            task.cancel()

        try:
            with meter.while_key_lasts(end):
                await task
        except asyncio.CancelledError:
            if not errors:
                task.cancel()
                raise
            meter.end_in_background("cancelled")
            raise errors[0] from None
        except BaseException:
            task.cancel()
            raise
