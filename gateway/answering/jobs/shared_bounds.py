"""The bounds of answers in which both models have a part."""

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine.events import EngineInfo, TierInfo
from outrider.gateway.contract.errors.tree import BadRequestError


def cascade_tier(candidates: Sequence[TierInfo], engine: EngineInfo, *, param: str) -> TierInfo:
    """Return the large tier, bounded by the small model's limits, for a speculative cascade.

    `param`: the field that asks for it. Raises BadRequestError where one of the two models has no
    part in the answer.
    """
    large = next((info for info in candidates if info.tier == "large"), None)
    if large is None:
        raise BadRequestError(
            f"{param}: in a cascade the large model verifies the drafts of the small "
            "one; set model to auto or large.",
            param=param,
        )
    if "small" not in engine.drafters:
        raise BadRequestError(
            f"{param}: a cascade needs a small model that drafts for the large one; this "
            "server runs without.",
            param=param,
        )
    return bounded(large, tuple(engine.tiers.values()))


def bounded(info: TierInfo, others: Sequence[TierInfo]) -> TierInfo:
    """Return a tier within the limits of all: both models have a part in the answer."""
    return replace(
        info,
        max_context=min(other.max_context for other in others),
        vocab_size=min(other.vocab_size for other in others),
    )
