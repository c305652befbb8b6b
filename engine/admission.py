"""What a model can serve: checks of requests before they are queued."""

from collections.abc import Collection
from typing import Final

from engine.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from engine.events import TierInfo
from engine.protocols import Drafter
from engine.request import EngineRequest, Tier
from engine.runner import ModelRunner
from engine.sequence import Sequence

# A refused request is told to come back after about this long.
_RETRY_AFTER_S: Final = 1.0


def check_prompt(request: EngineRequest, runner: ModelRunner) -> None:
    """Raise InvalidRequestError or PromptTooLongError for tokens that the model cannot take."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    for name, tokens in (("prompt", prompt), ("prediction", request.prediction_token_ids)):
        if tokens and (min(tokens) < 0 or max(tokens) >= runner.vocab_size):
            raise InvalidRequestError(
                f"{name} token ids must lie in [0, {runner.vocab_size}); "
                f"found {min(tokens)} to {max(tokens)}"
            )
    assert runner.max_context is not None
    if len(prompt) + request.sampling.max_tokens > runner.max_context:
        raise PromptTooLongError(
            num_tokens=len(prompt),
            max_tokens=request.sampling.max_tokens,
            max_context=runner.max_context,
        )


def check_cascade(
    request: EngineRequest, small: ModelRunner | None, drafter: Drafter | None
) -> None:
    """Raise unless both models can judge every position: both have to know every token."""
    if request.tier != "large":
        raise InvalidRequestError(
            f"a cascade is an answer of the large tier, not of {request.tier!r}"
        )
    if small is None or drafter is None or not drafter.gives_logits:
        raise InvalidRequestError(
            "a cascade needs a small model that drafts for the large one, with its tokenizer"
        )
    check_prompt(request, small)


def check_room(request: EngineRequest, waiting: Collection[Sequence], *, max_waiting: int) -> None:
    """Raise QueueFullError where `max_waiting` requests wait, unless others take all the room.

    A tenant that has less than its share of it, by weight among those that wait, is taken in; but
    never are there twice as many.
    """
    num_waiting = len(waiting)
    if num_waiting < max_waiting:
        return
    weights = {sequence.request.tenant: sequence.request.weight for sequence in waiting}
    weights[request.tenant] = request.weight
    num_own = sum(sequence.request.tenant == request.tenant for sequence in waiting)
    share = max_waiting * request.weight / sum(weights.values())
    if num_own >= share or num_waiting >= 2 * max_waiting:
        raise QueueFullError(num_waiting=num_waiting, retry_after_s=_RETRY_AFTER_S)


def tier_info(tier: Tier, runner: ModelRunner) -> TierInfo:
    """What a loaded tier is."""
    model = runner.model
    assert runner.max_context is not None
    return TierInfo(
        tier=tier,
        model_id=model.config.model_id.rstrip("/").rsplit("/", 1)[-1],
        path=model.config.model_id,
        max_context=runner.max_context,
        vocab_size=runner.vocab_size,
        num_parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        fingerprint=model.fingerprint,
    )
