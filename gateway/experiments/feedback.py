"""POST /v1/feedback: clients report the outcome of an answer."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from outrider.gateway.contract.answers.outcomes import ArmRef
from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.experiments.feedback_schema import (
    AnyFeedback,
    FeedbackReceipt,
    LabelFeedback,
    ScoreFeedback,
)
from outrider.gateway.experiments.feedback_totals import FeedbackRow
from outrider.gateway.experiments.measure_store import MAX_NAMES, MeasureStore, TooManyNamesError
from outrider.gateway.experiments.recent import (
    LEDGER_AGE_S,
    KnownRequest,
    RecentRequests,
    find_in_ledger,
)
from outrider.gateway.experiments.totals import FeedbackKind
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

_BODY: Final[TypeAdapter[AnyFeedback]] = TypeAdapter(AnyFeedback)
_ID: Final = re.compile(r"[!-~]{1,256}")
_GRACE_S: Final = 0.25
_MAX_SEARCHES: Final = 2
"""Searches of the ledger at once: clients that search for unknown ids must not block others."""
_NO_ARM: Final = ArmRef(experiment="", version=0, arm="")


class FeedbackDesk:
    """Finds the request that feedback is on, and stores the feedback. For one event loop."""

    def __init__(
        self,
        recent: RecentRequests,
        store: MeasureStore,
        database: Database | None,
        registry: CollectorRegistry,
        *,
        wall_clock: Callable[[], float] = time.time,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Store the arguments. `database`: the ledger's, for requests that are not in memory.

        `grace_s`: the wait for an unknown request, since its answer may just have ended.
        """
        self._recent = recent
        self._store = store
        self._database = database
        self._wall_clock = wall_clock
        self._grace_s = grace_s
        self.siblings: Siblings | None = None
        """This gateway's other processes, which may have answered the request."""
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)
        self._given = Counter(
            "outrider_feedback", "Feedback that was stored.", ["kind"], registry=registry
        )

    async def give(self, principal: Principal, said: AnyFeedback) -> None:
        """Store feedback, replacing earlier feedback of the same name.

        Raises NotFoundError where this tenant has had no such answer, BadRequestError where a
        request has too many names, StorageError.
        """
        known = await self._find(principal, said.request_id)
        if known is None:
            raise NotFoundError(
                "No recent request of this key has this id.",
                param="request_id",
                code="request_not_found",
            )
        rows = [
            _row(said, known, ref, principal.key_id, self._wall_clock())
            for ref in known.arms or (_NO_ARM,)
        ]
        try:
            await asyncio.to_thread(self._store.put_feedback, rows)
        except TooManyNamesError:
            raise BadRequestError(
                f"name: this request already has feedback under {MAX_NAMES} names, the maximum.",
                param="name",
            ) from None
        self._given.labels(rows[0].kind).inc()

    async def _find(self, principal: Principal, known_as: str) -> KnownRequest | None:
        if _ID.fullmatch(known_as) is None:  # no id of ours or of a server's looks like that
            return None
        found = self._recent.find(principal, known_as)
        if found is None:
            found = await self._find_at_siblings(principal, known_as, 0.0)
        if found is None and self._database is not None:
            since_s = self._wall_clock() - LEDGER_AGE_S
            async with self._searches:
                found = await asyncio.to_thread(
                    find_in_ledger, self._database, principal, known_as, since_s
                )
        if found is None:
            found = await _first_found(
                self._recent.wait_for(principal, known_as, self._grace_s),
                self._find_at_siblings(principal, known_as, self._grace_s),
            )
        return found

    async def find_here(self, asked: tuple[Principal, str, float]) -> KnownRequest | None:
        """Find a request of this process, for another one, with a wait of so many seconds."""
        return await self._recent.wait_for(*asked)

    async def _find_at_siblings(
        self, principal: Principal, known_as: str, grace_s: float
    ) -> KnownRequest | None:
        if self.siblings is None:
            return None
        answers = await self.siblings.others("find_request", (principal, known_as, grace_s))
        return next((found for found in answers if found is not None), None)


async def _first_found(
    *searches: Coroutine[Any, Any, KnownRequest | None],
) -> KnownRequest | None:
    """Return what the first search finds that finds something."""
    tasks = [asyncio.create_task(search) for search in searches]
    try:
        for search in asyncio.as_completed(tasks):
            if (found := await search) is not None:
                return found
    finally:
        for task in tasks:
            task.cancel()
    return None


class FeedbackApi:
    """The endpoint."""

    def __init__(self, desk: FeedbackDesk) -> None:
        self._desk = desk

    async def give(self, body: bytes, principal: Principal) -> Response:
        """Keep the feedback. Raises BadRequestError, NotFoundError, StorageError."""
        try:
            said = _BODY.validate_json(body)
        except ValidationError as error:
            raise bad_request(error, body) from None
        await self._desk.give(principal, said)
        receipt = FeedbackReceipt(request_id=said.request_id, name=said.name)
        return json_response(receipt, {"cache-control": "no-store"})


def _row(
    said: AnyFeedback, known: KnownRequest, ref: ArmRef, key_id: str, now_s: float
) -> FeedbackRow:
    kind, value, label = _content(said)
    return FeedbackRow(
        request_id=known.request_id,
        name=said.name,
        experiment=ref.experiment,
        version=ref.version,
        arm=ref.arm,
        unit_bucket=ref.unit_bucket,
        key_id=key_id,
        kind=kind,
        value=value,
        label=label,
        given_at=now_s,
    )


def _content(said: AnyFeedback) -> tuple[FeedbackKind, float, str]:
    if isinstance(said, ScoreFeedback):
        return "score", said.score, ""
    if isinstance(said, LabelFeedback):
        return "label", 1.0, said.label
    return "success", float(said.success), ""
