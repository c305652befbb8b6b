"""A step engine without models, whose tokens say when they left it: what is left is the way."""

import time
from collections.abc import Callable

from outrider.engine.cache.block_news import BlockFeed
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.errors import InvalidAdapterError
from outrider.engine.events import (
    AdapterInfo,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Finished,
    RequestStats,
    TierInfo,
    TokensEmitted,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.verifier.params import Tier

TOKENS_A_CHUNK = 4

_BASE = 2**20  # a stamp of nanoseconds as four tokens


def stamp() -> tuple[int, ...]:
    """Return the time as a chunk's tokens. One machine's processes have one monotonic clock."""
    left, parts = time.monotonic_ns(), []
    for _ in range(TOKENS_A_CHUNK):
        left, part = divmod(left, _BASE)
        parts.append(part)
    return tuple(parts)


def age_s(token_ids: tuple[int, ...]) -> float:
    """Return how long ago a chunk left its engine, in seconds."""
    stamped_ns = 0
    for part in reversed(token_ids):
        stamped_ns = stamped_ns * _BASE + part
    return (time.monotonic_ns() - stamped_ns) / 1e9


class StampedEngine:
    """A `StepEngine`: each step sleeps `step_s` and gives each request a chunk."""

    overlaps = False

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[str, int] = {}
        self._requests: dict[str, EngineRequest] = {}
        self.blocks = BlockFeed()
        self.pins = PinnedPrompts({})

    @property
    def has_work(self) -> bool:
        """True while a request is in flight."""
        return bool(self._left)

    def submit(self, request: EngineRequest) -> None:
        """Take a request in."""
        self._requests[request.request_id] = request
        self._left[request.request_id] = request.sampling.max_tokens // TOKENS_A_CHUNK

    def abort(self, request_id: str) -> None:
        """Give the request its last chunk next."""
        if request_id in self._left:
            self._left[request_id] = 1

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        """Return None: it has no blocks."""
        return None

    def keep_on_tier(self, request_id: str) -> None:
        """Nothing: no answer is held."""

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Nothing: there is one tier."""

    def prepare_adapter(
        self, ref: AdapterRef, on_prepared: Callable[[AdapterInfo | InvalidAdapterError], None]
    ) -> None:
        """Refuse it."""
        on_prepared(InvalidAdapterError("there is no model"))

    def step(
        self,
        on_events: Callable[[list[EngineEvent]], None] | None = None,
        while_busy: Callable[[], None] | None = None,
    ) -> list[EngineEvent]:
        """Sleep, and give each request a chunk."""
        if while_busy is not None:
            while_busy()
        if not self._left:
            return []
        time.sleep(self._step_s)
        events: list[EngineEvent] = []
        for request_id in list(self._left):
            events.append(TokensEmitted(request_id=request_id, token_ids=stamp()))
            self._left[request_id] -= 1
            if self._left[request_id] <= 0:
                del self._left[request_id]
                request = self._requests.pop(request_id)
                stats = RequestStats(num_prompt_tokens=len(request.prompt_token_ids))
                events.append(
                    Finished(
                        request_id=request_id,
                        tier=request.tier,
                        finish_reason="length",
                        stats=stats,
                    )
                )
        return events

    def stats(self) -> EngineStats:
        """All zero."""
        return EngineStats()

    def info(self) -> EngineInfo:
        """Return what it claims to be."""
        large = TierInfo(
            tier="large",
            model_id="stamped",
            path="",
            max_context=2**16,
            vocab_size=_BASE,
            num_parameters=1,
            dtype="float32",
            device="cpu",
        )
        return EngineInfo(tiers={"large": large}, speculation=False)


def build(step_s: str, on_progress: LoadingCallback) -> StampedEngine:
    """Build one in an engine's process."""
    del on_progress
    return StampedEngine(float(step_s))
