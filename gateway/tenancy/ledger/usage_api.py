"""GET /v1/usage: the usage of a key; for administrators, of all keys."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, get_args

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
)
from outrider.gateway.contract.schema.openapi import failures, success
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.book import Ledger
from outrider.gateway.tenancy.ledger.dimensions import Dimension
from outrider.gateway.tenancy.ledger.queries import UsageFilter
from outrider.gateway.tenancy.ledger.row import printable
from outrider.gateway.tenancy.ledger.timestamps import PATTERN, parse_time
from outrider.gateway.tenancy.ledger.usage_report import UsageQuestion, UsageReport, usage_report
from outrider.gateway.workers.siblings import Siblings

USAGE_MODELS: Final[tuple[type, ...]] = (UsageReport,)
"""Models for the components of the OpenAPI document."""

_MAX_GROUPS: Final = 1000
_MAX_WORD_CHARS: Final = 256
_MAX_AT_ONCE: Final = 2
"""Sums over years read much: however many ask, the database's other users get their turn."""
_FLUSH_TIMEOUT_S: Final = 2.0
"""While the database is slow to take new rows, a report comes without them after this time."""
_DIMENSIONS: Final[tuple[Dimension, ...]] = get_args(Dimension)
_OF_TIERS: Final = frozenset({"tier", "model"})
"""Dimensions that tell which server answered: the model is the server's name for it."""
_WORD: Final = {"type": "string", "minLength": 1, "maxLength": _MAX_WORD_CHARS}
_PARAMETERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "by": (
        "Group by this; `day` if it is left out and the key does not see tiers.",
        {"type": "string", "enum": list(_DIMENSIONS), "default": "tier"},
    ),
    "since": (
        "Start: an age such as 7d, a date, or seconds since 1970.",
        {"type": "string", "pattern": PATTERN},
    ),
    "until": ("Until when; that moment is not in it.", {"type": "string", "pattern": PATTERN}),
    "key": ("Only this key's, by its id. Another's is for administrators.", _WORD),
    "team": ("Only this team's, by its id.", _WORD),
    "tier": ("Only rows of this tier.", _WORD),
    "model": ("Only requests for this model.", _WORD),
    "end_user": ("Only this end user's, by its id.", _WORD),
    "limit": (
        "Groups at most.",
        {"type": "integer", "minimum": 1, "maximum": _MAX_GROUPS, "default": _MAX_GROUPS},
    ),
}


_FAILURES: Final = {
    403: "The key may see its own usage only, or does not see tiers.",
    404: "This gateway keeps no ledger.",
    503: "The ledger is unavailable.",
}


USAGE_OPERATION: Final[dict[str, Any]] = {
    "operationId": "getUsage",
    "parameters": [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": description,
            "schema": schema,
        }
        for name, (description, schema) in _PARAMETERS.items()
    ],
    "responses": {"200": success(UsageReport, "Usage.")}
    | failures(400, 401, *_FAILURES, words=_FAILURES),
}
"""The operation for the OpenAPI document."""


class UsageApi:
    """Answers questions about the ledger."""

    def __init__(
        self,
        database: Database | None,
        ledger: Ledger,
        *,
        wall_clock: Callable[[], float] = time.time,
        end_user_form: Callable[[str], str] = printable,
        siblings: Siblings | None = None,
    ) -> None:
        """Store the arguments. Without a database no usage is recorded or reported.

        `end_user_form`: returns the form in which the ledger keeps an end user's id.

        `siblings`: this gateway's other processes, which store their rows too before a report.
        """
        self._database = database
        self._ledger = ledger
        self._wall_clock = wall_clock
        self._end_user_form = end_user_form
        self._siblings = siblings
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    async def usage(self, request: Request, principal: Principal) -> Response:
        """Return a report: a key's own charges; for an administrator, all keys and our costs.

        What this gateway has answered before is in it.

        Raises BadRequestError, PermissionDeniedError, NotFoundError, StorageError.
        """
        question = read_question(
            dict(request.query_params), principal, self._wall_clock(), self._end_user_form
        )
        if self._database is None:
            raise NotFoundError(
                "This gateway has no ledger; the operator can enable it with database_url.",
                code="no_ledger",
            )
        async with self._turns:
            # Rows are stored in batches: without this, a client would miss its last requests.
            await self.flush()
            if self._siblings is not None:
                await self._siblings.others("flush_ledger")
            report = await asyncio.to_thread(usage_report, self._database, question)
        # Others must not find it in a shared cache.
        headers = {"cache-control": "private, no-store"}
        return json_response(report, headers)

    async def flush(self, _: object = None) -> None:
        """Store what this process has booked, if the database takes it soon."""
        with contextlib.suppress(StorageError, TimeoutError):
            await asyncio.wait_for(self._ledger.flush(), _FLUSH_TIMEOUT_S)


def read_question(
    parameters: dict[str, str],
    principal: Principal,
    now_s: float,
    end_user_form: Callable[[str], str],
) -> UsageQuestion:
    """Return the query string's question, as far as `principal` may ask it.

    Raises BadRequestError, PermissionDeniedError.
    """
    for name, value in parameters.items():
        if name not in _PARAMETERS:
            known = ", ".join(_PARAMETERS)
            raise BadRequestError(
                f"{name[:_MAX_WORD_CHARS]!r} is not a parameter; available: {known}.", param=name
            )
        if not value or len(value) > _MAX_WORD_CHARS or not value.isprintable():
            raise BadRequestError(f"{name}: this text cannot be a name or an id.", param=name)
    key = parameters.get("key")
    is_admin = principal.scopes.is_admin
    if not is_admin and key not in (None, principal.key_id):
        raise PermissionDeniedError("This key may read its own usage only.", param="key")
    end_user = parameters.get("end_user")
    sees_tiers = principal.scopes.shown() != "nothing"
    by = _dimension(parameters.get("by", "tier" if sees_tiers else "day"))
    for name in () if sees_tiers else _OF_TIERS & {by, *parameters}:
        raise PermissionDeniedError(
            f"This key does not see {name}s; leave {name} out, or use by=day.", param=name
        )
    return UsageQuestion(
        by=by,
        wanted=UsageFilter(
            since_s=_moment(parameters, "since", now_s),
            until_s=_moment(parameters, "until", now_s),
            key_ids=None if is_admin and key is None else (key or principal.key_id,),
            team_ids=(parameters["team"],) if "team" in parameters else None,
            tier=parameters.get("tier"),
            model=parameters.get("model"),
            end_user=None if end_user is None else end_user_form(end_user),
            only_charged=not is_admin,
        ),
        limit=_limit(parameters.get("limit")),
        with_costs=is_admin,
    )


def _dimension(text: str) -> Dimension:
    for dimension in _DIMENSIONS:
        if text == dimension:
            return dimension
    raise BadRequestError(f"by must be one of {', '.join(_DIMENSIONS)}.", param="by")


def _moment(parameters: dict[str, str], name: str, now_s: float) -> float | None:
    if name not in parameters:
        return None
    try:
        return parse_time(parameters[name], now_s)
    except ValueError as error:
        raise BadRequestError(f"{name}: {error}.", param=name) from None


def _limit(text: str | None) -> int:
    if text is None:
        return _MAX_GROUPS
    if text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_GROUPS:
        return int(text)
    raise BadRequestError(f"limit must be a whole number from 1 to {_MAX_GROUPS}.", param="limit")
