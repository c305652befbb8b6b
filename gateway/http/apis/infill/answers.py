"""Answers of /infill: the Structs that are sent, and described in /openapi.json."""

from typing import Annotated, Final, Literal

from outrider.gateway.contract.schema.responses import WrittenReport
from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.gateway.http.apis.infill.schema import InfillRequest

StopType = Literal["none", "eos", "limit", "word"]


class InfillTimings(ResponseModel):
    """Times in milliseconds."""

    prompt_n: Annotated[int, says("Tokens of the prompt that were computed, not cached.")]
    prompt_ms: Annotated[float, says("The time to the first token.")]
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class InfillAnswer(ResponseModel, kw_only=True):
    """An answer, or an event of a stream; the last one has what stands behind `model`."""

    index: int
    content: str
    stop: bool
    model: str
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: StopType | None = None
    stopping_word: str | None = None
    timings: InfillTimings | None = None
    outrider: WrittenReport = None


INFILL_MODELS: Final[tuple[type, ...]] = (InfillRequest, InfillAnswer)
