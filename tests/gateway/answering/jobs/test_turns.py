"""What holds the event loop while a request is planned is short, bounded and measured."""

import asyncio
from typing import Any, cast

from outrider.gateway.answering.jobs.tier_choice import TierChooser
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.reading.local_load import TierLoads
from outrider.gateway.answering.text.prompt_work import (
    INLINE_CHARS,
    OWN_TURN_CHARS,
    PromptSlots,
    PromptWork,
)
from outrider.router.policy import NO_CONSTRAINTS, FixedPolicy, Route, RouteConstraints


def test_other_requests_have_a_turn_before_a_decision_and_behind_it() -> None:
    turns: list[str] = []
    held_s: list[float] = []

    class Watched:
        def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
            turns.append("decision")
            asyncio.get_running_loop().call_soon(turns.append, "another behind it")
            return FixedPolicy("small").route(text, constraints)

    chooser = TierChooser(
        tokenizers={},
        router=Watched(),
        routing=cast(Any, None),  # of no use to the decision itself
        limits=GatewayLimits(),
        clock=lambda: 0.0,
        loads=TierLoads(lambda: 0.0),
        on_routed=held_s.append,
    )

    async def main() -> None:
        asyncio.get_running_loop().call_soon(turns.append, "another before it")
        await chooser._route("hi", NO_CONSTRAINTS)
        turns.append("prompt")

    asyncio.run(main())
    assert turns == ["another before it", "decision", "another behind it", "prompt"]
    assert len(held_s) == 1


def test_other_requests_have_a_turn_before_a_prompt_is_built_and_behind_it() -> None:
    turns: list[str] = []

    def build() -> None:
        turns.append("prompt")
        asyncio.get_running_loop().call_soon(turns.append, "another behind it")

    async def main(num_chars: int) -> None:
        turns.clear()
        asyncio.get_running_loop().call_soon(turns.append, "another before it")
        await PromptWork().run(num_chars, build)
        turns.append("engine")

    for num_chars in (OWN_TURN_CHARS, INLINE_CHARS - 1):
        asyncio.run(main(num_chars))
        assert turns == ["another before it", "prompt", "another behind it", "engine"]
    asyncio.run(main(OWN_TURN_CHARS - 1))
    assert turns[:2] == ["prompt", "engine"], "a turn costs more than so little work"


def test_prompts_are_observed_where_they_hold_the_loop_and_longer_ones_do_not() -> None:
    held_s: list[float] = []
    work = PromptWork(slots=PromptSlots(), on_held=held_s.append)

    async def main() -> None:
        assert await work.run(INLINE_CHARS - 1, lambda: "short") == "short"
        assert len(held_s) == 1
        assert await work.within(100, 1).run(INLINE_CHARS, lambda: "long") == "long"

    asyncio.run(main())
    assert len(held_s) == 1
