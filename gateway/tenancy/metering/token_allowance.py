"""Tokens that an answer may still have, where its tenant is limited."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from outrider.engine.events import EngineEvent, Finished, RequestStats, TierSwitched, TokensEmitted
from outrider.verifier.params import Tier

Grow = Callable[[int], Awaitable[bool]]
"""Reserves more tokens; False where a limit has no room for them."""

# More is reserved than is needed at once, so that not every step has to reserve.
_STEP_TOKENS: Final = 64


class TokenAllowance:
    """The reservation of a request's answers, shared by its choices.

    An answer without `max_tokens` begins with the usual length of such answers; it grows while it
    is written, and ends where its tenant's limit ends.
    """

    def __init__(self, num_tokens: int, grow: Grow | None = None) -> None:
        """Begin with `num_tokens` reserved. Without `grow` no more can be reserved."""
        self._num_left = num_tokens
        self._grow = grow
        self.is_used_up = False
        """True once an answer has been refused a token."""

    async def take(self, num_tokens: int) -> int:
        """Return how many of these tokens may be delivered; never more than are reserved."""
        while self._num_left < num_tokens and not self.is_used_up:
            missing = num_tokens - self._num_left
            # Near its end a limit may have room for a part of them.
            wanted = (max(missing, _STEP_TOKENS), *range(missing, 0, -1))
            self.is_used_up = not await self._any_of(wanted)
        taken = min(num_tokens, self._num_left)
        self._num_left -= taken
        return taken

    async def stock_up(self, num_tokens: int) -> int:
        """Reserve up to this total, for callers that cannot await; return the number held."""
        missing = num_tokens - self._num_left
        while missing > 0 and not await self._any_of((missing,)):
            missing //= 2
        return self._num_left

    def give_back(self, num_tokens: int) -> None:
        """Tokens that were not delivered after all: their answer was given up for another."""
        self._num_left += num_tokens

    async def _any_of(self, wanted: Iterable[int]) -> bool:
        """Reserve the first of these amounts that the limits have room for."""
        if self._grow is None:
            return False
        for num_tokens in wanted:
            if await self._grow(num_tokens):
                self._num_left += num_tokens
                return True
        return False


async def within_allowance(
    events: AsyncGenerator[EngineEvent], allowance: TokenAllowance, tier: Tier
) -> AsyncGenerator[EngineEvent]:
    """Yield the events of one choice until its allowance ends, as at `max_tokens`.

    The choice begins on `tier`. Tokens that the engine writes after the end are aborted and not
    delivered.
    """
    num_taken = 0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TokensEmitted):
                num_tokens = len(event.token_ids)
                granted = await allowance.take(num_tokens)
                num_taken += granted
                if granted < num_tokens:
                    if granted:
                        yield _cut(event, granted)
                    yield Finished(
                        request_id=event.request_id,
                        tier=tier,
                        finish_reason="length",
                        stats=RequestStats(num_prompt_tokens=0, num_output_tokens=num_taken),
                    )
                    return
            elif isinstance(event, TierSwitched):
                tier = event.tier
                if not event.keeps_answer:
                    allowance.give_back(num_taken)
                    num_taken = 0
            yield event


def _cut(event: TokensEmitted, num_tokens: int) -> TokensEmitted:
    """Return the first tokens of a step."""
    return replace(
        event,
        token_ids=event.token_ids[:num_tokens],
        logprobs=event.logprobs[:num_tokens],
        num_accepted_tokens=min(event.num_accepted_tokens, num_tokens),
        num_predicted_tokens=min(event.num_predicted_tokens, num_tokens),
        num_unratified_tokens=min(event.num_unratified_tokens, num_tokens),
        num_reused_tokens=min(event.num_reused_tokens, num_tokens),
        trace=event.trace and replace(event.trace, origins=event.trace.origins[:num_tokens]),
    )
