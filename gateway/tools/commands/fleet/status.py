"""What `outrider fleet status` shows: each kind of engine, its replicas, and where they are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.wiring.ray.plan import EnginePlan

if TYPE_CHECKING:
    from rich.table import Table

_TIMEOUT_S: Final = 30.0


def status_table(application: str) -> "Table | None":
    """Return the engines of a Serve application, a line each; None where it does not run."""
    from ray import serve
    from ray.exceptions import RayError

    found = serve.status().applications.get(application)
    if found is None:
        return None
    try:
        known = serve.get_app_handle(application).describe.remote().result(timeout_s=_TIMEOUT_S)
    except (RayError, TimeoutError):  # the directory is down: what Serve knows is shown
        known = {}
    return engines_table(found.deployments, known)


def engines_table(
    deployments: Mapping[str, Any], known: Mapping[str, tuple[EnginePlan, list[str]]]
) -> "Table":
    """Make the table of what Serve says of the deployments, and what the directory knows."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("engines", "models", "replicas", "bounds", "state", "addresses"):
        table.add_column(name, overflow="fold")
    for name, deployment in deployments.items():
        if name == "directory":
            continue
        plan, addresses = known.get(name, (None, []))
        counts = [
            f"{count} {str(getattr(state, 'value', state)).lower()}"
            for state, count in deployment.replica_states.items()
        ]
        is_asleep = plan is not None and plan.min_replicas == 0
        state = str(deployment.status.value).lower().replace("_", " ")
        table.add_row(
            name,
            "" if plan is None else "\n".join(filter(None, (plan.large, plan.small))),
            ", ".join(counts) or ("none until a request comes" if is_asleep else "none"),
            "" if plan is None else f"{plan.min_replicas} to {plan.max_replicas}",
            f"{state}: {deployment.message}" if deployment.message else state,
            "\n".join(addresses),
        )
    return table
