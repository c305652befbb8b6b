"""An engine without models that writes at a set pace, and says where its tokens come from."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence

from benchmarks.shared.mock_engine import MockEngine
from outrider.engine.events import (
    EngineEvent,
    EngineInfo,
    Finished,
    PrefillDone,
    RequestStats,
    TierInfo,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.engine.trace import StepTrace, TokenOrigin, TraceNode
from outrider.gateway.engines.backends.client import OnEnd, tell_end

_DRAFTED: tuple[TokenOrigin, ...] = ("model", "suffix", "model", "prediction")


class PacedEngine(MockEngine):
    """An `EngineClient` whose answers have `max_tokens` tokens, so many a second.

    Steps emit `tokens_per_step` of them and are on time: a late one catches up. Of a step all
    tokens but the last were drafted, in a tree of `num_nodes` guesses.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        vocab_size: int,
        tokens_per_s: float,
        max_context: int = 8192,
    ) -> None:
        """`token_ids` are the answer, again and again."""
        super().__init__()
        self._token_ids = tuple(token_ids)
        self._vocab_size = vocab_size
        self._tokens_per_s = tokens_per_s
        self._max_context = max_context
        self.tokens_per_step = 1
        self.num_nodes = 0

    async def info(self) -> EngineInfo:
        """Return what it claims to be."""
        tiers = {
            tier: TierInfo(
                tier=tier,
                model_id=f"paced-{tier}",
                path="",
                max_context=self._max_context,
                vocab_size=self._vocab_size,
                num_parameters=1,
                dtype="float32",
                device="cpu",
            )
            for tier in self._tiers
        }
        return EngineInfo(tiers=tiers, speculation=True)

    async def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncGenerator[EngineEvent]:
        """Answer at the pace."""
        request_id = request.request_id
        stats = RequestStats(num_prompt_tokens=len(request.prompt_token_ids))
        last = Finished(
            request_id=request_id, tier=request.tier, finish_reason="abort", stats=stats
        )
        try:
            yield PrefillDone(
                request_id=request_id,
                tier=request.tier,
                num_prompt_tokens=stats.num_prompt_tokens,
                num_cached_tokens=0,
                queue_s=0.0,
            )
            async for event in self._steps(request):
                yield event
            last = Finished(
                request_id=request_id, tier=request.tier, finish_reason="length", stats=stats
            )
            yield last
        finally:
            tell_end(on_end, request_id, last)

    async def _steps(self, request: EngineRequest) -> AsyncGenerator[EngineEvent]:
        words = itertools.cycle(self._token_ids)
        num_left = request.sampling.max_tokens
        root = next(words)
        due_s = time.perf_counter()
        while num_left:
            num_new = min(self.tokens_per_step, num_left)
            num_left -= num_new
            due_s += num_new / self._tokens_per_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            emitted = tuple(itertools.islice(words, num_new))
            yield TokensEmitted(
                request_id=request.request_id,
                token_ids=emitted,
                num_drafted_tokens=self.num_nodes,
                num_accepted_tokens=num_new - 1 if self.num_nodes else 0,
                trace=self._trace(root, emitted) if request.traces else None,
            )
            root = emitted[-1]

    def _trace(self, root: int, emitted: Sequence[int]) -> StepTrace:
        if not self.num_nodes:
            return StepTrace(origins=tuple("target" for _ in emitted))
        right = emitted[:-1]
        nodes = [TraceNode(token_id=root, parent=-1, is_accepted=True)]
        for depth, token_id in enumerate(right):
            nodes.append(
                TraceNode(token_id=token_id, parent=depth, sources=("model",), is_accepted=True)
            )
        for number in range(self.num_nodes - len(right)):  # wrong ones beside and below them
            word = self._token_ids[number % len(self._token_ids)]
            nodes.append(TraceNode(token_id=word, parent=number, sources=("model",)))
        drafted = tuple(itertools.islice(itertools.cycle(_DRAFTED), len(right)))
        return StepTrace(origins=(*drafted, "target"), nodes=tuple(nodes))
