"""The body of every failure, as OpenAI's clients expect it."""

from pydantic import BaseModel, ConfigDict

from gateway.answers.responder import HandOffKind


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the path of the offending field, e.g. messages.0.content."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """What every endpoint answers when it fails."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


class DeliveredReport(BaseModel):
    """What was delivered of an answer that broke off: by whom, and how many tokens."""

    model_config = ConfigDict(extra="forbid")

    tier: str
    reason: str
    hand_off: HandOffKind | None
    degraded: bool
    completion_tokens: int


class ErrorEvent(ErrorResponse):
    """The last event of a stream that fails midway."""

    outrider: DeliveredReport
