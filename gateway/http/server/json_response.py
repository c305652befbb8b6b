"""A successful answer in JSON."""

import msgspec
from starlette.responses import Response


def json_response(content: object) -> Response:
    """Encode `content` as a response with status 200."""
    return Response(msgspec.json.encode(content), media_type="application/json")
