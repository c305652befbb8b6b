"""schemathesis over some routes alone: an OpenAPI document of them, and a run against it."""

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.gateway.contract.schema.errors import ErrorResponse
from outrider.gateway.contract.schema.structs import schemas_of
from outrider.gateway.tenancy.keys.admin_handlers import AdminRoute


@dataclass(frozen=True, slots=True)
class FuzzedRoutes:
    """The checks that failed, and the status of every response."""

    failures: list[Any]
    statuses: list[int]


def document_of(routes: Iterable[AdminRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes alone."""
    paths: dict[str, Any] = {}
    models = [model for route in routes for model in route.models]
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = route.operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "admin", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas_of([*models, ErrorResponse])},
    }


def fuzz_routes(
    app: Starlette,
    document: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    known: Mapping[str, Collection[str]],
    is_excused: Callable[[str], bool],
) -> FuzzedRoutes:
    """Send made requests to every route of the document.

    `known`: values to try for parameters, by name. `is_excused`: of a check, by its name.
    """
    described = copy.deepcopy(dict(document))
    for path in described["paths"].values():
        for operation in path.values():
            for parameter in operation["parameters"]:
                if (values := known.get(parameter["name"])) is not None:
                    parameter["schema"] = {"enum": list(values)}
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "headers": dict(headers),
            "generation": {"max-examples": 8},
            "phases": {
                "coverage": {"enabled": True},
                "fuzzing": {"enabled": True},
                "examples": {"enabled": False},
                "stateful": {"enabled": False},
            },
        }
    )

    async def openapi(_: Request) -> Response:
        return Response(json.dumps(described), media_type="application/json")

    app.router.routes.append(Route("/openapi.json", openapi))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    failures: list[Any] = []
    statuses: list[int] = []
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, checks in event.recorder.checks.items():
            response = event.recorder.interactions[case_id].response
            assert response is not None
            statuses.append(response.status_code)
            failures += [
                (check.name, check.failure_info, response.request.body, response.content[:300])
                for check in checks
                if check.status is Status.FAILURE and not is_excused(check.name)
            ]
    return FuzzedRoutes(failures, statuses)
