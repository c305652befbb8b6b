"""/infill in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import generation_operation
from outrider.gateway.http.apis.infill.answers import InfillAnswer
from outrider.gateway.http.apis.infill.schema import InfillRequest


def infill_operation() -> dict[str, Any]:
    """A POST of the texts around the cursor."""
    return generation_operation(InfillRequest, InfillAnswer, InfillAnswer, "infill")
