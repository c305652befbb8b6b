"""POST /infill: the request.

Fields typed `Ignored` change nothing here, and an answer names the ones that a request has.
"""

from typing import Annotated, Final

from pydantic import Field, JsonValue

from outrider.gateway.contract.schema.common import (
    MAX_STOPS,
    WHOLE,
    Ignored,
    ListOf,
    ModelName,
    OutriderOptions,
    Penalty,
    RequestModel,
    StopString,
)
from outrider.gateway.contract.schema.completions import MAX_EXTRA_FILES, ExtraFile
from outrider.gateway.contract.schema.kinds import AUTO

_Integer = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE]


class InfillRequest(RequestModel):
    """Text to fill in between a prefix and a suffix, in llama.cpp's words."""

    input_prefix: Annotated[str, Field(description="What stands in front of the cursor's line.")]
    input_suffix: str
    input_extra: Annotated[ListOf[ExtraFile], Field(max_length=MAX_EXTRA_FILES)] | None = None
    prompt: Annotated[str, Field(description="The cursor's line so far, behind the prefix.")] = ""
    model: ModelName = AUTO
    n_predict: Annotated[
        _Integer | None,
        Field(description="The most tokens; 0: none; absent and less: what the server gives."),
    ] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: Annotated[ListOf[StopString], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, JsonValue] | None = None
    stream: bool | None = None
    outrider: OutriderOptions | None = None

    cache_prompt: Ignored = None
    id_slot: Ignored = None
    n_indent: Ignored = None
    n_keep: Ignored = None
    n_probs: Ignored = None
    min_keep: Ignored = None
    repeat_last_n: Ignored = None
    response_fields: Ignored = None
    samplers: Ignored = None
    t_max_predict_ms: Ignored = None
    t_max_prompt_ms: Ignored = None
    timings_per_token: Ignored = None
    typical_p: Ignored = None


IGNORED: Final = (
    *("cache_prompt", "id_slot", "n_indent", "n_keep", "n_probs", "min_keep", "repeat_last_n"),
    *("response_fields", "samplers", "t_max_predict_ms", "t_max_prompt_ms", "timings_per_token"),
    "typical_p",
)
"""The fields that change nothing."""
