"""The endpoints of /admin and their description in the OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from outrider.gateway.contract.schema.openapi import failures, json_content, success
from outrider.gateway.tenancy.keys.admin_schema import (
    MAX_PAGE,
    KeyCreate,
    KeyList,
    KeyReport,
    KeyRotate,
    KeyUpdate,
    NewKeyReport,
    TeamCreate,
    TeamList,
    TeamReport,
    TeamUpdate,
)

HttpMethod = Literal["GET", "POST", "PATCH", "DELETE"]

_FAILURES: Final[Mapping[int, str]] = {
    400: "The request is malformed; `param` names the field.",
    401: "Missing or unknown key.",
    403: "The key has not the admin scope.",
    404: "Unknown key, team or experiment, or no database.",
    429: "Too many wrong keys came from this address.",
    503: "The database is unavailable.",
}
_KEY_ID: Final = {
    "name": "key_id",
    "in": "path",
    "required": True,
    "description": "The key's public id: 8 characters.",
    "schema": {"type": "string", "minLength": 1},
}
_TEAM: Final = {
    "name": "team",
    "in": "path",
    "required": True,
    "description": "The team's id or name.",
    "schema": {"type": "string", "minLength": 1},
}
_PAGING: Final = [
    {
        "name": "after",
        "in": "query",
        "required": False,
        "description": "Only keys whose ids come after this one.",
        "schema": {"type": "string"},
    },
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "description": "How many at most.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100},
    },
]
_BOTH: Final = frozenset({401, 403, 404, 429, 503})
_WITH_BODY: Final = _BOTH | {400, 413, 415}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """One endpoint. `handler` is the name of AdminApi's method, `operation` its OpenAPI
    description."""

    method: HttpMethod
    path: str
    handler: str
    operation: dict[str, Any]


def admin_operation(
    name: str,
    answer: type,
    description: str,
    *,
    body: type | None = None,
    parameters: list[dict[str, Any]] | None = None,
    conflicts: bool = False,
) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint of /admin."""
    statuses = (_BOTH if body is None else _WITH_BODY) | ({409} if conflicts else set())
    if any(each["in"] == "query" for each in parameters or []):
        statuses |= {400}
    operation: dict[str, Any] = {
        "operationId": name,
        "tags": ["admin"],
        "parameters": parameters or [],
        "responses": {"200": success(answer, description)}
        | failures(*sorted(statuses), words=_FAILURES),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": json_content(body)}
    return operation


def _routes() -> tuple[AdminRoute, ...]:
    keys, key = "/admin/keys", "/admin/keys/{key_id}"
    teams, team = "/admin/teams", "/admin/teams/{team}"
    rows: tuple[tuple[HttpMethod, str, str, dict[str, Any]], ...] = (
        (
            "GET",
            keys,
            "list_keys",
            admin_operation("listKeys", KeyList, "A page of the keys.", parameters=_PAGING),
        ),
        (
            "POST",
            keys,
            "create_key",
            admin_operation("createKey", NewKeyReport, "The key, shown once.", body=KeyCreate),
        ),
        (
            "GET",
            key,
            "get_key",
            admin_operation("getKey", KeyReport, "The key.", parameters=[_KEY_ID]),
        ),
        (
            "PATCH",
            key,
            "update_key",
            admin_operation(
                "updateKey",
                KeyReport,
                "The key as it is now.",
                body=KeyUpdate,
                parameters=[_KEY_ID],
            ),
        ),
        (
            "DELETE",
            key,
            "revoke_key",
            admin_operation("revokeKey", KeyReport, "The key, revoked.", parameters=[_KEY_ID]),
        ),
        (
            "POST",
            f"{key}/rotate",
            "rotate_key",
            admin_operation(
                "rotateKey",
                NewKeyReport,
                "The key with its new secret, shown once.",
                body=KeyRotate,
                parameters=[_KEY_ID],
                conflicts=True,
            ),
        ),
        ("GET", teams, "list_teams", admin_operation("listTeams", TeamList, "All teams.")),
        (
            "POST",
            teams,
            "create_team",
            admin_operation("createTeam", TeamReport, "The team.", body=TeamCreate, conflicts=True),
        ),
        (
            "GET",
            team,
            "get_team",
            admin_operation("getTeam", TeamReport, "The team.", parameters=[_TEAM]),
        ),
        (
            "PATCH",
            team,
            "update_team",
            admin_operation(
                "updateTeam",
                TeamReport,
                "The team as it is now.",
                body=TeamUpdate,
                parameters=[_TEAM],
                conflicts=True,
            ),
        ),
    )
    return tuple(
        AdminRoute(method=method, path=path, handler=handler, operation=operation)
        for method, path, handler, operation in rows
    )


ADMIN_ROUTES: Final = _routes()
