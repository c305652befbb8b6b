"""The body of every failure, as OpenAI's clients expect it."""

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the path of the offending field, e.g. messages.0.content."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Also the last event of a stream that fails midway."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
