"""Where a tenant's limit ends an answer, the reported tokens end there too."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from outrider.engine.events import EngineEvent, Finished, TierSwitched, TokensEmitted
from outrider.engine.trace import StepTrace, TraceNode
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance, within_allowance
from outrider.verifier.token_logprobs import TokenLogprobs

NODES = (
    TraceNode(token_id=1, parent=-1, is_accepted=True),
    TraceNode(token_id=5, parent=0, sources=("model",), is_accepted=True),
    TraceNode(token_id=6, parent=1, sources=("reused", "suffix"), is_accepted=True),
)
STEP = TokensEmitted(
    request_id="r",
    token_ids=(5, 6, 7),
    num_drafted_tokens=2,
    num_accepted_tokens=2,
    num_reused_tokens=1,
    logprobs=tuple(TokenLogprobs(token_id=n, logprob=-0.5) for n in (5, 6, 7)),
    trace=StepTrace(origins=("model", "reused", "target"), nodes=NODES),
)


def within(num_tokens: int, *events: EngineEvent) -> list[EngineEvent]:
    async def written() -> AsyncGenerator[EngineEvent]:
        for event in events:
            yield event

    async def main() -> list[EngineEvent]:
        return [
            event
            async for event in within_allowance(written(), TokenAllowance(num_tokens), "small")
        ]

    return asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_step_that_is_cut_has_an_origin_for_each_token(num_tokens: int) -> None:
    cut, end = within(num_tokens, STEP)
    assert isinstance(cut, TokensEmitted)
    assert cut.trace is not None
    assert cut.token_ids == (5, 6, 7)[:num_tokens]
    assert cut.trace.origins == ("model", "reused", "target")[:num_tokens]
    assert cut.trace.nodes == NODES, "what was guessed stays what was guessed"
    assert len(cut.logprobs) == cut.num_accepted_tokens == num_tokens
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stats.num_output_tokens) == ("length", num_tokens)


def test_a_step_within_the_credit_is_left_as_it_is() -> None:
    (step,) = within(3, STEP)
    assert step is STEP


def test_untraced_steps_are_cut_too() -> None:
    cut, _ = within(1, TokensEmitted(request_id="r", token_ids=(5, 6)))
    assert isinstance(cut, TokensEmitted)
    assert cut.trace is None


def test_allowance_of_retracted_tokens_is_left_for_the_large_answer() -> None:
    switch = TierSwitched(request_id="r", tier="large", keeps_answer=False)
    assert within(3, STEP, switch, STEP) == [STEP, switch, STEP]
