"""Checks before an experiment starts that this gateway can serve what its arms set."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.planner import Planner
from outrider.gateway.answering.reading.parsed_request import RequestContext
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import ConflictError, GatewayError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.settings.arm_overlay import REQUEST_FIELDS
from outrider.gateway.settings.experiments import ExperimentSpec

_PROBE: Final = "Hello"
_SERVER_ERROR: Final = 500

ArmCheck = Callable[[ExperimentSpec], Awaitable[None]]
"""Raises ConflictError, with a message, for an arm under which no request could be served."""


def arm_check(planner: Planner, clock: Callable[[], float]) -> ArmCheck:
    """Ask the planner where a short request of each arm would go; nothing is answered."""

    async def check(spec: ExperimentSpec) -> None:
        models = spec.eligible.models or [AUTO]
        model = AUTO if AUTO in models else models[0]
        for arm in spec.arms:
            body = msgspec.json.encode(_request(model, spec.overlay(arm).document()))
            try:
                await planner.route_report(
                    "chat", body, RequestContext(arrival_s=clock(), request_id="")
                )
            except (GatewayError, EngineError) as error:
                # Models that are loading, and servers that are down, may be there by then.
                if problem_of(error).status < _SERVER_ERROR:
                    raise ConflictError(
                        f"The arm {arm!r} cannot be served here: {error}", param=f"arms.{arm}.set"
                    ) from None

    return check


def _request(model: str, sets: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": _PROBE}],
    }
    request |= {name: sets.pop(name) for name in REQUEST_FIELDS if name in sets}
    return request | ({"outrider": sets} if sets else {})
