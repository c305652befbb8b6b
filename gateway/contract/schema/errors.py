"""The body of every failure, as OpenAI's clients expect it."""

from typing import Annotated

from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.contract.schema.structs import ResponseModel, says


class ErrorDetail(ResponseModel):
    """Description of an error."""

    message: str
    type: str
    param: Annotated[str | None, says("The invalid field's path, e.g. messages.0.content.")]
    code: str | None


class ErrorResponse(ResponseModel):
    """Error response of every endpoint."""

    error: ErrorDetail


class DeliveredReport(ResponseModel):
    """Delivered part of an answer that broke off.

    Tier and reason are null where the key or the alias does not reveal them.
    """

    tier: str | None
    reason: str | None
    hand_off: HandOffKind | None
    degraded: bool
    completion_tokens: int


class ErrorEvent(ErrorResponse):
    """The last event of a stream that fails midway."""

    outrider: DeliveredReport
