"""POST /v1/route: what a request would be answered by, without answering it."""

from typing import Annotated, Literal

from outrider.gateway.contract.schema.structs import ResponseModel, says
from outrider.verifier.params import Tier


class WatchReport(ResponseModel):
    """Watching of the small model's answer: the most that is held back."""

    hold_back_tokens: int
    hold_back_ms: Annotated[float | None, says("Null if the whole answer is judged.")]
    judges_whole: bool
    mid_stream: bool


MaximumCost = Annotated[
    float | None,
    says(
        "What the answer may cost; null without prices. It counts the exact prompt and "
        "`max_tokens`; without that the server's default, else the mean length of answers so far. "
        "An upper estimate for an upstream tier, whose tokens are unknown."
    ),
]


class TierOption(ResponseModel):
    """A tier that could answer."""

    tier: Tier | None
    model_id: str | None
    cost_usd: MaximumCost


class ExpectedCost(ResponseModel):
    """What the request is expected to cost by who answers, in one unit."""

    unit: Annotated[Literal["second", "dollar"], says("Seconds to the last token, or USD.")]
    small: float
    cascade: Annotated[float, says("Begun by the small model and taken over by the large one.")]
    large: float


class ModelChance(ResponseModel):
    """A model that an alias's router chooses among."""

    model: str
    right: Annotated[float, says("The estimated probability that its answer is right.")]


class RouteReport(ResponseModel):
    """Tier that the request would go to, and why.

    Tiers, reason and costs are null where the key or the alias does not reveal them.
    """

    object: Literal["route"]
    model: str
    tier: str | None
    model_id: str | None
    reason: str | None
    quality: Annotated[
        float | None,
        says(
            "The router's prediction that the small model's answer is good enough, null if there "
            "is none."
        ),
    ]
    threshold: Annotated[
        float | None,
        says(
            "What `quality` was compared with where there is no `band`. The watch compares its own "
            "confidence with it too."
        ),
    ]
    band: Annotated[
        tuple[float, float] | None,
        says("What `quality` was compared with: between low and high the small model is watched."),
    ]
    small_right: Annotated[
        tuple[float, float] | None,
        says(
            "An interval of the probability that the small model is right, by the prompt's "
            "text; null where the router has none."
        ),
    ]
    stage: Annotated[
        Literal["text", "prompt", "answer"] | None,
        says("The last stage to decide: text, prompt (the small model's reading of it) or answer."),
    ]
    cascade: WatchReport | None
    prompt_tokens: Annotated[int | None, says("Null for an upstream tier.")]
    cost_usd: MaximumCost
    sticky: Annotated[Tier | None, says("The tier that has the conversation in its cache.")]
    pair: Annotated[str | None, says("Fingerprints of the models that the router was trained for.")]
    alternatives: Annotated[list[TierOption], says("The other tiers that this `model` may mean.")]
    costs: Annotated[
        list[ExpectedCost] | None,
        says("By predicted lengths, where the router weighs costs; null where it does not."),
    ] = None
    chances: Annotated[
        list[ModelChance] | None,
        says("The models that the alias's router chose among, by rising cost; null without one."),
    ] = None
