"""Reading a request's body as the endpoints of administrators do."""

from starlette.requests import Request

from outrider.gateway.contract.schema.parsing import JsonBounds
from outrider.gateway.http.edge.bodies import BodyBudget, read_json_body

_BODY_BYTES = 2**20


async def read_small_body(request: Request) -> bytes:
    budget = BodyBudget(max_bytes=_BODY_BYTES, max_bytes_per_owner=_BODY_BYTES)
    with budget.hold("tester") as held:
        return await read_json_body(
            request, limit_bytes=_BODY_BYTES, held=held, bounds=JsonBounds()
        )
