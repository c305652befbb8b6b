"""The large model's judgement of tokens that the small model wrote, and that were kept."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from outrider.engine.events import EngineEvent, Failed, Finished, TokensEmitted
from outrider.engine.request import LOW, EngineRequest
from outrider.gateway.engines.backends.client import EngineClient


async def shared_tokens(
    engine: EngineClient, request: EngineRequest, token_ids: Sequence[int]
) -> float | None:
    """Return the share of the tokens that the large model writes too; None if it fails.

    `request`: the answer's, for the large tier's tokenizer, as are the `token_ids` (at least one).
    They are its prediction: a pass or two judge them all.
    """
    look = replace(
        request,
        request_id=f"{request.request_id}-look",
        tier="large",
        group_id=None,
        may_escalate=False,
        return_hidden_state=False,
        traces=False,
        priority=LOW,
        prediction_token_ids=tuple(token_ids),
        # One more: the last token of a pass is the large model's own, whatever was predicted.
        sampling=replace(
            request.sampling,
            max_tokens=len(token_ids) + 1,
            min_tokens=0,
            num_logprobs=0,
            num_prompt_logprobs=None,
        ),
    )
    num_same = 0
    events = cast(AsyncGenerator[EngineEvent], engine.submit(look, None))
    async with aclosing(events) as stream:
        async for event in stream:
            match event:
                case TokensEmitted():
                    num_same += event.num_predicted_tokens
                case Finished():
                    return min(num_same / len(token_ids), 1.0)
                case Failed():
                    return None
    return None
