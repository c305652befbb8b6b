"""POST /v1/route: what a request would be answered by, without answering it."""

from typing import Literal

from outrider.gateway.contract.schema.responses import ResponseModel
from outrider.verifier.params import Tier


class CascadeReport(ResponseModel):
    """Watching of the small model's answer: the most that is held back.

    `hold_back_ms` is null if the whole answer is judged (`judges_whole`).
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
    """Tier that the request would go to, and why.

    `quality`: the router's prediction that the small model's answer is good enough, null if there
    is
    none. It was compared with `band` (between low and high the small model begins watched) or,
    without one, with `threshold`, with which the watch compares its own confidence too. `stage`:
    the
    last stage to decide: text, prompt (the small model's reading of it) or answer. `sticky`: the
    tier
    that has the conversation in its cache. `pair`: fingerprints of the models that the router was
    trained for. `alternatives`: the other tiers that this `model` may mean. For an upstream tier
    `prompt_tokens` is null, and `cost_usd` is an upper estimate: its tokens are unknown.
    """

    object: Literal["route"]
    model: str
    tier: str | None
    model_id: str | None
    reason: str | None
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
