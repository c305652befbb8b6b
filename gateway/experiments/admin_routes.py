"""The endpoints of /admin/experiments and their description in the OpenAPI document."""

from typing import Any, Final

from outrider.gateway.experiments.admin_schema import (
    DeletedExperiment,
    ExperimentAnalysis,
    ExperimentCreate,
    ExperimentDetail,
    ExperimentList,
    ExperimentReport,
    ExperimentUpdate,
)
from outrider.gateway.tenancy.keys.admin_routes import AdminRoute, HttpMethod, admin_operation

MAX_VERSION: Final = 2**31 - 1

_NAME: Final = {
    "name": "experiment",
    "in": "path",
    "required": True,
    "description": "The experiment's name.",
    "schema": {"type": "string", "minLength": 1},
}
_VERSION: Final = {
    "name": "version",
    "in": "query",
    "required": False,
    "description": "Which version; the newest where it is absent.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_VERSION},
}


def _routes() -> tuple[AdminRoute, ...]:
    every, one = "/admin/experiments", "/admin/experiments/{experiment}"
    rows: tuple[tuple[HttpMethod, str, str, dict[str, Any]], ...] = (
        (
            "GET",
            every,
            "list_experiments",
            admin_operation("listExperiments", ExperimentList, "All experiments."),
        ),
        (
            "POST",
            every,
            "create_experiment",
            admin_operation(
                "createExperiment",
                ExperimentReport,
                "The experiment.",
                body=ExperimentCreate,
                conflicts=True,
            ),
        ),
        (
            "GET",
            one,
            "get_experiment",
            admin_operation(
                "getExperiment",
                ExperimentDetail,
                "The experiment, its versions and its history.",
                parameters=[_NAME],
            ),
        ),
        (
            "PATCH",
            one,
            "update_experiment",
            admin_operation(
                "updateExperiment",
                ExperimentReport,
                "The experiment as it is now.",
                body=ExperimentUpdate,
                parameters=[_NAME],
                conflicts=True,
            ),
        ),
        (
            "DELETE",
            one,
            "delete_experiment",
            admin_operation(
                "deleteExperiment",
                DeletedExperiment,
                "It is forgotten.",
                parameters=[_NAME],
                conflicts=True,
            ),
        ),
        *(
            (
                "POST",
                f"{one}/{verb}",
                f"{verb}_experiment",
                admin_operation(
                    f"{verb}Experiment",
                    ExperimentReport,
                    "The experiment as it is now.",
                    parameters=[_NAME],
                    conflicts=True,
                ),
            )
            for verb in ("start", "stop")
        ),
        (
            "GET",
            f"{one}/report",
            "report_experiment",
            admin_operation(
                "reportExperiment",
                ExperimentAnalysis,
                "The conclusions so far.",
                parameters=[_NAME, _VERSION],
            ),
        ),
    )
    return tuple(
        AdminRoute(method=method, path=path, handler=handler, operation=operation)
        for method, path, handler, operation in rows
    )


EXPERIMENT_ROUTES: Final = _routes()
