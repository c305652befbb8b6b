"""The steps before and after every endpoint: limits, body, account, trace."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fastapi import Request
from starlette.responses import Response

from gateway.answers.outcomes import OutcomeSink
from gateway.edge.bodies import BodyBudget, read_json_body
from gateway.errors.tree import GatewayError
from gateway.handoff.parsed_request import RequestContext
from gateway.metering.meter import Account, RequestMeter
from gateway.metering.outcome_record import OutcomeRecord
from gateway.metering.tenancy import Tenancy
from gateway.planning.gateway_limits import GatewayLimits
from gateway.server.auth_dispatcher import principal_of
from gateway.server.request_watch import RequestWatch, Watched
from gateway.telemetry.capture import NULL_CAPTURE, Capture
from gateway.telemetry.log_context import log_context
from gateway.telemetry.tracer import NULL_SPAN, NULL_TRACER, Span, Tracer
from gateway.tenants.principal import ANONYMOUS, Principal
from gateway.upstream.call import HOPS_HEADER

MAX_SMALL_BODY_BYTES: Final = 2**20
"""The bound on a body that holds no prompt."""
_HOP: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIntake:
    """Counts requests, reads their bodies, and opens their accounts and traces.

    `sinks` receive the outcome of each request. `clock` is monotonic, `wall_clock` seconds since
    1970.
    """

    tenancy: Tenancy
    limits: GatewayLimits
    bodies: BodyBudget
    sinks: Sequence[OutcomeSink]
    tracer: Tracer
    capture: Capture
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def record(self, arrival_s: float) -> OutcomeRecord:
        """Open the record of a request that the outcome sinks receive."""
        return OutcomeRecord(
            self.sinks, arrival_s=arrival_s, clock=self.clock, wall_clock=self.wall_clock
        )

    def watch(
        self, request: Request, account: Account, body: bytes, record: OutcomeRecord
    ) -> RequestWatch | None:
        """Begin to follow a request for operators; its trace begins or goes on here.

        None where neither traces nor texts are recorded.
        """
        if self.tracer is NULL_TRACER and self.capture is NULL_CAPTURE:
            return None
        headers = request.headers
        span = self.tracer.begin(
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
        return RequestWatch(watched, span, self.capture, self.wall_clock, record)

    def meter(
        self,
        request: Request,
        endpoint: str,
        arrival_s: float,
        record: OutcomeRecord | None = None,
    ) -> RequestMeter:
        account = Account(
            principal=principal_of(request),
            request_id=next(self.tenancy.row_ids),
            client_request_id=request.state.request_id,
            endpoint=endpoint,
            arrival_s=arrival_s,
        )
        return RequestMeter(
            self.tenancy,
            account,
            clock=self.clock,
            wall_clock=self.wall_clock,
            on_booked=None if record is None else record.booked,
        )

    @asynccontextmanager
    async def entered(
        self,
        request: Request,
        meter: RequestMeter,
        record: OutcomeRecord | None = None,
        limit_bytes: int | None = None,
    ) -> AsyncIterator[bytes]:
        """Count a request and read its body; both are held until the block ends.

        A request that ends without an answer of its own (a repeated one) gives its count back, and
        so does one that fails through no fault of its own.
        """
        try:
            await meter.enter()
        except GatewayError as error:
            if record is not None:
                watch = self.watch(request, meter.account, b"", record)
                (record if watch is None else watch).ended(None, "failed", None, error)
            raise
        try:
            with self.bodies.hold(_owner_of(request)) as held:
                most = limit_bytes or self.limits.max_body_bytes
                bounds = self.limits.json_bounds
                yield await read_json_body(request, limit_bytes=most, held=held, bounds=bounds)
            await meter.finish("failed")
        except Exception as error:
            meter.failed_by(error)
            await meter.finish("failed")
            raise
        finally:
            meter.end("failed")

    async def counted(
        self,
        request: Request,
        work: Callable[[bytes, Principal], Awaitable[Response]],
        *,
        limit_bytes: int | None = None,
    ) -> Response:
        """Do work that writes no answer; it counts as a request in the limits all the same.

        `limit_bytes`: of its body, where the limit is not the settings'.
        """
        meter = self.meter(request, request.scope["path"], self.clock())
        async with self.entered(request, meter, limit_bytes=limit_bytes) as body:
            response = await work(body, principal_of(request))
            response.headers.update(meter.headers)
            await meter.finish("answered")
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


def _owner_of(request: Request) -> str:
    """Name the owner of a body's bytes: the key, or the address where there is no key."""
    principal = principal_of(request)
    if principal.key_id != ANONYMOUS.key_id:
        return principal.key_id
    return f"address {request.client.host if request.client else '-'}"


def request_context(
    request: Request,
    arrival_s: float,
    meter: RequestMeter | None = None,
    span: Span = NULL_SPAN,
    record: OutcomeRecord | None = None,
) -> RequestContext:
    """Build the context of a body."""
    headers = request.headers
    told = ",".join(headers.getlist(HOPS_HEADER)).split(",")
    # A malformed gateway id is not passed on: the header goes to upstream servers.
    hops = tuple(hop for part in told if _HOP.fullmatch(hop := part.strip()))
    return RequestContext(
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
