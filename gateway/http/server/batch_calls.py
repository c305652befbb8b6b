"""Answers the requests of batches by the same way as those that come by HTTP, without a socket."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from outrider.gateway.answering.candidates.pass_through import PASSED_ROUTES
from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.contract.errors.http import ProblemBodies
from outrider.gateway.http.apis.batches.calls import Answered
from outrider.gateway.http.edge.bodies import BodyBudget
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.http.server.auth_dispatcher import AuthDispatcher, EndpointHandler
from outrider.gateway.http.server.endpoints import AnswerEndpoints, RequestIntake
from outrider.gateway.http.server.pass_through_endpoints import PassThroughEndpoints
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.book import Ledger, NullLedger
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow

logger = logging.getLogger(__name__)

_BOOKED_S: Final = 30.0
"""How long an answer waits for the engine to report what it took."""
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_EMBEDDINGS: Final = "/v1/embeddings"


class _Books(NullLedger):
    """Gathers the rows of requests under way, by their ids; enters others, uncharged.

    Implements `Ledger` and `OutcomeSink`. The ledger itself is started and closed elsewhere.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[str, tuple[list[LedgerRow], asyncio.Event]] = {}

    def begin(self, request_id: str) -> asyncio.Event:
        """Gather a request's rows; the event is set when all of them are there."""
        is_booked = asyncio.Event()
        self._open[request_id] = [], is_booked
        return is_booked

    def end(self, request_id: str) -> tuple[LedgerRow, ...]:
        """Return the rows so far."""
        return tuple(self._open.pop(request_id)[0])

    def add(self, row: LedgerRow) -> None:
        """Gather a row. One that comes late belongs to no result that is charged."""
        if (found := self._open.get(row.client_request_id)) is not None:
            found[0].append(row)
        else:
            self.forgive((row,))

    def forgive(self, rows: Sequence[LedgerRow]) -> None:
        """Enter rows without their charges."""
        for row in rows:
            self._ledger.add(msgspec.structs.replace(row, charge_nanos=0, num_charged_tokens=0))

    def observe(self, outcome: RequestOutcome) -> None:
        """Note that a request is booked."""
        if (found := self._open.get(outcome.client_request_id)) is not None:
            found[1].set()


class BatchCalls:
    """Asks the gateway's own endpoints. Implements `Ask`.

    All of an HTTP request's way is theirs: its key's scopes, limits and budgets as they are then.
    Only its charge is that of batches, and its ledger's rows are handed over with the answer.
    """

    def __init__(
        self,
        answers: AnswerEndpoints,
        passing: PassThroughEndpoints,
        *,
        prices: PriceBook,
        principal_of: Callable[[str], Principal],
        max_concurrent: int,
    ) -> None:
        """`max_concurrent`: requests that are asked at once."""
        intake = answers.intake
        self._books = _Books(intake.tenancy.ledger)
        own = _own_intake(intake, self._books, prices, max_concurrent)
        asked = replace(answers, intake=own)
        endpoints: dict[str, EndpointHandler] = {
            _CHAT: asked.chat,
            _COMPLETIONS: asked.completions,
            _RESPONSES: asked.responses,
        }
        route = next(each for each in PASSED_ROUTES if each.endpoint == "embeddings")
        endpoints[_EMBEDDINGS] = replace(passing, intake=own).endpoint(route)
        self._app = AuthDispatcher(
            FastAPI(),  # which is not reached: there are no other paths
            endpoints,
            authenticate=lambda key_id, _, __: principal_of(key_id or ""),
            foreign_pages=ForeignPages(),
            problem_bodies=ProblemBodies({_RESPONSES: answers.responses_api.problem_body}),
            free_paths=frozenset(),
        )

    async def ask(self, key_id: str, path: str, body: bytes, request_id: str) -> Answered:
        """Answer a request of a key as it is now. Errors are answers, too."""
        status, headers, received = 500, Headers(), bytearray()

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            received.extend(message.get("body", b""))

        is_booked = self._books.begin(request_id)
        try:
            await self._app(_scope(key_id, path, body, request_id), _sender(body), send)
            if status == 200 and path != _EMBEDDINGS:
                async with asyncio.timeout(_BOOKED_S):
                    await is_booked.wait()
        except TimeoutError:
            logger.error("the work of a batch's request was not reported id=%s", request_id)
        except Exception as error:
            logger.exception("a batch's request failed id=%s", request_id, exc_info=error)
        except BaseException:
            self.forgive(self._books.end(request_id))
            raise
        rows = self._books.end(request_id)
        return Answered(status=status, headers=headers, body=bytes(received), rows=rows)

    def forgive(self, rows: Sequence[LedgerRow]) -> None:
        """Enter rows that nobody is charged for."""
        self._books.forgive(rows)


def _own_intake(
    intake: RequestIntake, books: _Books, prices: PriceBook, max_concurrent: int
) -> RequestIntake:
    """Return an intake with the prices of batches, whose bodies take no room from others."""
    most = intake.limits.max_body_bytes * max_concurrent
    return replace(
        intake,
        tenancy=replace(intake.tenancy, ledger=books, prices=prices),
        sinks=(*intake.sinks, books),
        bodies=BodyBudget(max_bytes=most, max_bytes_per_owner=most),
    )


def _scope(key_id: str, path: str, body: bytes, request_id: str) -> dict[str, Any]:
    headers = {
        "host": "localhost",
        "authorization": key_id,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
        "client": None,
        "server": None,
    }


def _sender(body: bytes) -> Receive:
    """Return what gives the body once; its client never leaves."""
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop()

    return receive
