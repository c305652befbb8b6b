"""POST /v1/route: what a request would be answered by, without answering it."""

from typing import Literal

from engine.request import Tier
from gateway.schema.responses import ResponseModel


class CascadeReport(ResponseModel):
    """How the small model's answer would be watched: what is held back at most.

    `hold_back_ms` is null where the whole answer is judged (`judges_whole`).
    """

    hold_back_tokens: int
    hold_back_ms: float | None
    judges_whole: bool
    mid_stream: bool


class TierOption(ResponseModel):
    """A tier that could answer. `cost_usd`: what it may cost; null without prices.

    It counts the exact prompt and `max_tokens`; without that the server's default, else the mean
    length of answers so far.
    """

    tier: Tier
    model_id: str
    cost_usd: float | None


class RouteReport(ResponseModel):
    """Where the request would go, and why.

    `quality`: how safe the router judges the small model's answer, null if not judged. It was
    compared with `band` (between low and high the small model begins under watch) or, without one,
    with `threshold`, with which the watch compares its own confidence too. `stage`: what has the
    last word: text, prompt (the small model's reading of it) or answer. `sticky`: the tier that has
    the conversation in its cache. `pair`: fingerprints of the models that the router was trained
    for. `alternatives`: the other tiers that this `model` may mean. For an upstream tier
    `prompt_tokens` is null, and `cost_usd` is an upper estimate: its tokens are unknown.
    """

    object: Literal["route"]
    model: str
    tier: str
    model_id: str | None
    reason: str
    quality: float | None
    threshold: float | None
    band: tuple[float, float] | None
    stage: Literal["text", "prompt", "answer"] | None
    cascade: CascadeReport | None
    prompt_tokens: int | None
    cost_usd: float | None
    sticky: Tier | None
    pair: str | None
    alternatives: list[TierOption]
