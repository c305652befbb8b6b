"""The body of every failure, as OpenAI's clients expect it."""

from pydantic import BaseModel, ConfigDict

from outrider.gateway.contract.answers.responder import HandOffKind


class ErrorDetail(BaseModel):
    """Description of an error; `param` is the invalid field's path, e.g. messages.0.content."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Error response of every endpoint."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


class DeliveredReport(BaseModel):
    """Delivered part of an answer that broke off: its tier, and the number of tokens."""

    model_config = ConfigDict(extra="forbid")

    tier: str
    reason: str
    hand_off: HandOffKind | None
    degraded: bool
    completion_tokens: int


class ErrorEvent(ErrorResponse):
    """The last event of a stream that fails midway."""

    outrider: DeliveredReport
